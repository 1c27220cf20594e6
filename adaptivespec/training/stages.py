"""The three stages, each from its options to what it leaves in the output folder."""

import argparse
import hashlib
import json

import torch
from tqdm import tqdm

from adaptivespec.config import load_settings
from adaptivespec.errors import ConfigError, RequestError
from adaptivespec.local import LocalSystem
from adaptivespec.models.decoder import Decoder, eagle3_layers, output_rows
from adaptivespec.models.loading import load_model
from adaptivespec.tokenizer import Tokenizer, load_tokenizer
from adaptivespec.training import folder
from adaptivespec.training.batches import HELD_OUT, held_out
from adaptivespec.training.corpus import Corpus, Entry
from adaptivespec.training.evaluate import SHAPES, measure
from adaptivespec.training.export import export
from adaptivespec.training.generate import Generator, Skipped, generate, plan
from adaptivespec.training.model import TrainableHead
from adaptivespec.training.prompts import Excluded, read_prompts, read_self_written
from adaptivespec.training.ranks import Ranks
from adaptivespec.training.train import Recipe, Trainer
from adaptivespec.training.warm_start import (
    count_tokens,
    draft_vocabulary,
    earlier_head,
    head_config,
    warm_start,
)

_PLANNED = (
    "model",
    "prompts",
    "self_written",
    "exclude",
    "sampled",
    "temperature",
    "seed",
    "max_prompt",
    "max_answer",
)
"""Options that decide what is generated."""


def run_generate(args: argparse.Namespace, ranks: Ranks) -> None:
    """Answer the prompts into `corpus`. What the options ask for is checked before weights load."""
    excluded = Excluded(m for text in args.exclude for m in read_prompts(text).messages)
    files = [read_prompts(text) for text in args.prompts]
    own = [read_self_written(text) for text in args.self_written]
    jobs = plan(files, own, excluded, args.sampled, args.temperature, args.seed)
    asked = sum(len(f.messages) for f in files) + sum(s.count for s in own)
    if not jobs:
        reason = "all are empty or excluded" if asked else "give --prompts or --self-written"
        raise ConfigError(f"no prompts: {reason}")
    config, _ = load_model(args.model, torch.bfloat16, only=())
    if args.max_prompt + args.max_answer > config.context_length:
        raise ConfigError(
            f"--max-prompt {args.max_prompt} and --max-answer {args.max_answer}: together more "
            f"than the {config.context_length} tokens that {args.model} takes"
        )
    aux_layers = eagle3_layers(config.layers)
    tokenizer = _chat_tokenizer(args)
    options = {name: getattr(args, name) for name in _PLANNED}
    folder.begin(args.output, options, jobs, excluded, ranks)

    def new_generator() -> Generator:
        _, weights = load_model(args.model, torch.bfloat16, ranks.device)
        return Generator(
            Decoder(config, weights, torch.bfloat16, ranks.device),
            tokenizer,
            aux_layers,
            excluded,
            slots=args.slots,
            max_prompt=args.max_prompt,
            max_answer=args.max_answer,
        )

    skipped = generate(
        new_generator,
        jobs[ranks.rank :: ranks.world],
        args.output / "corpus",
        shard=256,
        max_bytes=int(args.max_disk_gb * 1e9),
        quiet=not ranks.first,
    )
    counts = ranks.sum(torch.tensor([skipped[r] for r in Skipped], device=ranks.device)).tolist()
    reasons = {"prompts that are empty or excluded": asked - len(jobs)}
    reasons |= {r.value: count for r, count in zip(Skipped, counts, strict=True)}
    listed = ", ".join(f"{count} {reason}" for reason, count in reasons.items() if count)
    if not Corpus(args.output / "corpus").entries:
        raise ConfigError(f"no conversation was recorded; skipped: {listed or 'all, earlier'}")
    if ranks.first and listed:
        print(f"generate: skipped {listed}", flush=True)


def _chat_tokenizer(args: argparse.Namespace) -> Tokenizer:
    """Raises ConfigError where the model's chat template does not do for training."""
    tokenizer = load_tokenizer(args.model)
    try:
        end = tokenizer.end_of_user_turn()
    except RequestError as error:
        raise ConfigError(
            f"{args.model}: has no chat template that takes a user's message alone"
        ) from error
    if args.self_written and end is None:
        raise ConfigError(
            "--self-written: this chat template does not end a user's message with a token of its "
            "own"
        )
    return tokenizer


def run_train(args: argparse.Namespace, corpus: Corpus, ranks: Ranks) -> None:
    """Train on what `generate` recorded, and write the result to `head`."""
    config, weights = load_model(args.model, torch.bfloat16)  # of which little goes to the device
    counts = count_tokens(corpus.answers(), config.vocab_size)
    if args.after:
        ids, start = earlier_head(args.after / "head", config)
    else:
        ids = draft_vocabulary(counts, min(args.draft_vocabulary, config.vocab_size))
        start = warm_start(config, weights, ids, args.seed)
    head = TrainableHead(
        head_config(config, len(ids)),
        start,
        weights["model.embed_tokens.weight"].to(ranks.device),
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
    target_head = output_rows(config, weights)[ids].to(ranks.device)
    trainer = Trainer(head, target_head, corpus, recipe, ranks)
    if ranks.first:
        covered = counts[ids].sum() / counts.sum()
        print(
            f"train: {trainer.conversations} of {len(corpus.entries)} conversations, the draft "
            f"vocabulary has {covered:.1%} of their answer tokens; {trainer.steps} steps",
            flush=True,
        )
    trainer.run(args.output, args.save_every)
    if ranks.first:
        export(args.output / "head", head.config, head.standard(), head.target_ids)


def kept(corpus: Corpus) -> list[Entry]:
    """One conversation for each prompt that is kept from training. Raises ConfigError when there is
    none."""
    by_prompt = {e.prompt_hash: e for e in corpus.entries if held_out(e)}
    if not by_prompt:
        raise ConfigError(
            f"none of {len(corpus.entries)} conversations is among the {HELD_OUT:.0%} of prompts "
            "kept for the stage evaluate; give more prompts, or run --stage train alone"
        )
    return list(by_prompt.values())


def run_evaluate(args: argparse.Namespace) -> None:
    """Measured in bf16, greedy and lossless; `evaluation.json` keeps what is done."""
    head, file = args.output / "head", args.output / "evaluation.json"
    if not (head / "model.safetensors").exists():
        raise ConfigError(f"{head}: no head; run the stage train first")
    corpus = folder.corpus_of(args.model, args.output)
    prompts = [corpus.prompt(entry) for entry in kept(corpus)[: args.evaluation_prompts]]
    max_tokens = min(128, args.max_answer)
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
    weights = (head / "model.safetensors").read_bytes()
    digest = hashlib.sha256(weights + repr((prompts, max_tokens)).encode()).hexdigest()
    results = json.loads(file.read_text()) if file.exists() else {}
    if results.get("sha256") != digest:
        results = {"sha256": digest, "prompts": len(prompts), "shapes": {}}
    bar = tqdm(args.shape or SHAPES, desc="evaluate", unit="shape")
    for shape in bar:
        name = ",".join(map(str, shape))
        if name not in results["shapes"]:
            measured = measure(system, prompts, shape, max_tokens=max_tokens)
            results["shapes"][name] = {
                "acceptance_length": round(measured.usage.mean_acceptance_length, 3),
                "by_depth": [round(share, 3) for share in measured.by_depth],
            }
            folder.write_json(file, results)
        bar.write(f"evaluate: {name}: {results['shapes'][name]}")
