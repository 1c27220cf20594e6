"""`adaptivespec train-eagle3`: from prompts to a head, in three stages that can all be resumed."""

import argparse
from pathlib import Path

from adaptivespec import arguments
from adaptivespec.config import Settings, check_shape
from adaptivespec.training import folder
from adaptivespec.training.evaluate import SHAPES
from adaptivespec.training.ranks import Ranks
from adaptivespec.training.stages import kept, run_evaluate, run_generate, run_train
from adaptivespec.training.train import Recipe

STAGES = ("generate", "train", "evaluate")
_RECIPE = Recipe()
_LISTED = "%(default).0s"  # prints nothing, and keeps argparse from adding "(default: None)"


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
    add(
        "--stage",
        action="append",
        choices=STAGES,
        help=f"run only this; may be given several times (default: all in turn){_LISTED}",
    )
    add("--device", choices=["cpu", "cuda"], default="cpu", help="cuda: a GPU for each process")
    add(
        "--threads",
        type=arguments.positive,
        default=1,
        help="on a CPU, of each process; to use more cores, start more processes with torchrun",
    )
    add("--seed", type=arguments.seed, default=0, help="of the order, all draws and the start")
    add = parser.add_argument_group("generate").add_argument
    add("--slots", type=arguments.positive, default=96, help="answers written at once")
    add("--max-prompt", type=arguments.positive, default=256, help="tokens; longer: skipped")
    add("--max-answer", type=arguments.positive, default=192, help="tokens; longer: cut")
    add("--sampled", type=arguments.share, default=0.2, help="share of sampled answers")
    add("--temperature", type=arguments.temperature, default=0.7, help="of sampled answers")
    add("--max-disk-gb", type=arguments.above_zero, default=25.0, help="stop at so much data")
    add = parser.add_argument_group("train").add_argument
    add(
        "--after",
        type=Path,
        metavar="OUTPUT",
        help="of an earlier run: train on its conversations too, beginning with its head and its "
        f"draft vocabulary (default: begin with the target's own parts){_LISTED}",
    )
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
        default=",".join(map(str, _RECIPE.unroll)),
        metavar="FIRST,SECOND",
        help="steps of training-time test, in the first and second half of the run",
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
    add(
        "--shape",
        type=arguments.shape,
        action="append",
        metavar="DEPTH,WIDTH,NODES",
        help="of the trees to measure; may be given several times "
        f"(default: {' '.join(','.join(map(str, shape)) for shape in SHAPES)}){_LISTED}",
    )
    add("--evaluation-prompts", type=arguments.positive, default=64, help="of those held out")


def train_eagle3(args: argparse.Namespace) -> int:
    """Train an EAGLE-3 head for a target: it answers the prompts (generate), the head learns from
    its hidden states (train) and is tried on prompts kept from training (evaluate). Every stage
    goes on where it was stopped, when called again with the same options. Under torchrun, the
    first two share the work among its processes."""
    stages = args.stage or STAGES
    for shape in args.shape or ():
        check_shape(shape, "--shape", Settings().max_shape)
    ranks = Ranks(args.device, args.threads)
    try:
        folder.make(args.output)
        if "generate" in stages:
            run_generate(args, ranks)
            ranks.wait()
        if "train" in stages:
            earlier = [args.after] if args.after else []
            corpus = folder.corpus_of(args.model, args.output, *earlier)
            if "evaluate" in stages:
                kept(corpus)  # what it would complain of after hours
            run_train(args, corpus, ranks)
            ranks.wait()
        if "evaluate" in stages and ranks.first:
            run_evaluate(args)
    finally:
        ranks.close()
    return 0
