"""`adaptivespec train-eagle3`: from prompts to a head, in three stages that can all be resumed."""

import argparse
import hashlib
import json
from pathlib import Path

import torch

from adaptivespec import arguments
from adaptivespec.config import load_settings
from adaptivespec.errors import ConfigError
from adaptivespec.local import LocalSystem
from adaptivespec.models.decoder import Decoder
from adaptivespec.models.loading import load_model
from adaptivespec.shape import Shape
from adaptivespec.tokenizer import load_tokenizer
from adaptivespec.training.batches import held_out
from adaptivespec.training.corpus import Corpus
from adaptivespec.training.evaluate import measure
from adaptivespec.training.export import export
from adaptivespec.training.generate import Generator, Job, generate, plan
from adaptivespec.training.model import TrainableHead
from adaptivespec.training.prompts import Excluded, read_prompts, read_self_written
from adaptivespec.training.ranks import Ranks
from adaptivespec.training.train import Recipe, Trainer
from adaptivespec.training.warm_start import draft_vocabulary, head_config, warm_start

STAGES = ("generate", "train", "evaluate")
_RECIPE = Recipe()


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `adaptivespec train-eagle3`."""
    add = parser.add_argument
    add("output", type=Path, help="folder for all that is made; the head: OUTPUT/head")
    add("--model", default="smollm2", metavar="PATH", help="folder, hub id, GGUF file or smollm2")
    add(
        "--prompts",
        action="append",
        default=[],
        metavar="FILE:FIELD[:COUNT[:STEP]]",
        help="user messages from a JSONL file; a file given twice is answered twice",
    )
    add(
        "--self-written",
        action="append",
        default=[],
        metavar="COUNT[:START]",
        help="user messages that the target writes itself, each beginning with START",
    )
    add(
        "--exclude",
        action="append",
        default=[],
        metavar="FILE:FIELD",
        help="messages never to train on, recognised by their words",
    )
    add("--stage", action="append", choices=STAGES, help="run only this; default: all, in order")
    add("--device", choices=["cpu", "cuda"], default="cpu")
    add("--threads", type=arguments.positive, default=1, help="per process, on a CPU")
    add("--seed", type=int, default=0)
    add = parser.add_argument_group("generate").add_argument
    add("--slots", type=arguments.positive, default=96, help="answers written at once")
    add("--max-prompt", type=arguments.positive, default=256, help="tokens; longer: skipped")
    add("--max-answer", type=arguments.positive, default=192, help="tokens; longer: cut")
    add("--sampled", type=arguments.share, default=0.2, help="share of sampled answers")
    add("--temperature", type=arguments.temperature, default=0.7, help="of sampled answers")
    add("--max-disk-gb", type=arguments.above_zero, default=25.0, help="stop at so much data")
    add = parser.add_argument_group("train").add_argument
    add("--draft-vocabulary", type=arguments.positive, default=16384, help="tokens kept")
    add(
        "--passes", type=arguments.above_zero, default=_RECIPE.passes, help="over all conversations"
    )
    add(
        "--tokens-per-step",
        type=arguments.positive,
        default=_RECIPE.tokens,
        help="of all processes",
    )
    add(
        "--unroll",
        type=arguments.positive_pair,
        default=_RECIPE.unroll,
        help="steps, in either half",
    )
    add(
        "--learning-rate",
        type=arguments.above_zero,
        default=_RECIPE.learning_rate,
        help="of the layer",
    )
    add(
        "--head-learning-rate",
        type=arguments.above_zero,
        default=_RECIPE.head_learning_rate,
        help="of the output layer",
    )
    add("--save-every", type=arguments.positive, default=200, help="steps between checkpoints")
    add = parser.add_argument_group("evaluate").add_argument
    add("--shape", type=arguments.shape, action="append", metavar="DEPTH,WIDTH,NODES")
    add("--evaluation-prompts", type=arguments.positive, default=64, help="of those held out")


def train_eagle3(args: argparse.Namespace) -> int:
    """Train an EAGLE-3 head for a target: it answers the prompts (generate), the head learns from
    its hidden states (train) and is tried on prompts kept from training (evaluate). Every stage
    goes on where it was stopped, when called again with the same options. Under torchrun, the
    first two share the work among its processes."""
    stages = args.stage or STAGES
    ranks = Ranks(args.device, args.threads)
    try:
        args.output.mkdir(parents=True, exist_ok=True)
        if "generate" in stages:
            _generate(args, ranks)
            ranks.wait()
        if "train" in stages:
            _train(args, ranks)
            ranks.wait()
        if "evaluate" in stages and ranks.first:
            _evaluate(args)
    finally:
        ranks.close()
    return 0


def _generate(args: argparse.Namespace, ranks: Ranks) -> None:
    excluded = Excluded(m for text in args.exclude for m in read_prompts(text).messages)
    jobs = plan(
        [read_prompts(text) for text in args.prompts],
        [read_self_written(text) for text in args.self_written],
        excluded,
        args.sampled,
        args.temperature,
        args.seed,
    )
    if not jobs:
        raise ConfigError("no prompts: give --prompts or --self-written")
    limits = {name: getattr(args, name) for name in ("model", "max_prompt", "max_answer")}
    _same_plan(args.output / "plan.json", jobs, limits, ranks)
    config, weights = load_model(args.model, torch.bfloat16, ranks.device)
    generator = Generator(
        Decoder(config, weights, torch.bfloat16, ranks.device),
        load_tokenizer(args.model),
        head_config(config, 1).aux_layers,
        excluded,
        slots=args.slots,
        max_prompt=args.max_prompt,
        max_answer=args.max_answer,
    )
    generate(
        generator,
        jobs[ranks.rank :: ranks.world],
        args.output / "corpus",
        shard=256,
        max_bytes=int(args.max_disk_gb * 1e9),
        quiet=not ranks.first,
    )


def _same_plan(file: Path, jobs: list[Job], limits: dict[str, object], ranks: Ranks) -> None:
    """Shards know their conversations by number: refuse other conversations in the same folder."""
    digest = hashlib.sha256(repr(jobs).encode()).hexdigest()
    mine = limits | {"conversations": len(jobs), "sha256": digest}
    if file.exists():
        if (there := json.loads(file.read_text())) != mine:
            raise ConfigError(
                f"{file}: begun with other prompts or options ({there}, not {mine}); resume with "
                "the same ones, or choose another output folder"
            )
    elif ranks.first:
        unfinished = file.with_suffix(".tmp")
        unfinished.write_text(json.dumps(mine) + "\n")
        unfinished.rename(file)  # at once: other processes may be reading already
    ranks.wait()


def _train(args: argparse.Namespace, ranks: Ranks) -> None:
    corpus = _corpus(args)
    config, weights = load_model(args.model, torch.bfloat16, ranks.device)
    size = min(args.draft_vocabulary, config.vocab_size)
    ids = draft_vocabulary(corpus.answers(), size, config.vocab_size)
    head = TrainableHead(
        head_config(config, size),
        warm_start(head_config(config, size), weights, ids, args.seed),
        weights["model.embed_tokens.weight"],
        ids,
    ).to(ranks.device)
    recipe = Recipe(
        passes=args.passes,
        tokens=args.tokens_per_step,
        unroll=args.unroll,
        learning_rate=args.learning_rate,
        head_learning_rate=args.head_learning_rate,
        seed=args.seed,
    )
    output = weights.get("lm_head.weight", weights["model.embed_tokens.weight"])
    trainer = Trainer(head, output[ids.to(output.device)], corpus, recipe, ranks)
    trainer.run(args.output, args.save_every)
    if ranks.first:
        export(args.output / "head", head.config, head.standard(), head.target_ids)


def _corpus(args: argparse.Namespace) -> Corpus:
    corpus = Corpus(args.output / "corpus")
    if not corpus.entries:
        raise ConfigError(
            f"{args.output / 'corpus'}: no conversations; run the stage generate first"
        )
    return corpus


def _evaluate(args: argparse.Namespace) -> None:
    """Measured in bf16, greedy and lossless; `evaluation.json` keeps what is done."""
    head, file = args.output / "head", args.output / "evaluation.json"
    if not (head / "model.safetensors").exists():
        raise ConfigError(f"{head}: no head; run the stage train first")
    corpus = _corpus(args)
    entries = [e for e in corpus.entries if held_out(e, _RECIPE.held_out)]
    distinct = {entry.prompt_hash: entry for entry in entries}
    chosen = list(distinct.values())[: args.evaluation_prompts]
    if not chosen:
        raise ConfigError("too few conversations: none of them was held out from training")
    prompts = [corpus.prompt(entry) for entry in chosen]
    compute = {"threads": args.threads, "device": args.device}
    compute |= {"num_gpus": 1.0} if args.device == "cuda" else {}
    system = LocalSystem.load(
        load_settings(
            {
                "model": {"path": args.model},
                "target": {"compute": compute, "max_queued": len(prompts)},
                "drafter": {"kind": "eagle3", "path": str(head), "compute": compute},
            }
        )
    )
    digest = hashlib.sha256((head / "model.safetensors").read_bytes()).hexdigest()
    results = json.loads(file.read_text()) if file.exists() else {}
    if results.get("sha256") != digest:
        results = {"sha256": digest, "prompts": len(prompts), "shapes": {}}
    for shape in args.shape or SHAPES:
        name = ",".join(map(str, shape))
        if name not in results["shapes"]:
            measured = measure(system, prompts, shape)
            results["shapes"][name] = {
                "acceptance_length": round(measured.usage.mean_acceptance_length, 3),
                "by_depth": [round(share, 3) for share in measured.by_depth],
            }
            file.write_text(json.dumps(results, indent=2) + "\n")
        print(f"evaluate: {name}: {results['shapes'][name]}", flush=True)


SHAPES = [Shape(3, 4, 4), Shape(7, 1, 8), Shape(5, 4, 16), Shape(6, 8, 32)]
"""Evaluated unless others are named."""
