"""Are drafted nodes accepted as often as the policy `goodput` predicts?

    python infra/calibration.py --drafter eagle3:HEAD --set gsm8k.jsonl:question:40 ...
        [--kappa 1 --kappa 0.2] [--plot calibration.svg]

Answers prompts greedily with trees of that policy. A node's prediction, the product of calibrated
conditionals along its path, is made before its outcome is known; a node is accepted if it is on the
accepted path. Prints the reliability table and the expected calibration error, the mean over nodes
of |share accepted - mean prediction| of the node's bin. Sets as in acceptance.py; --plot needs
matplotlib.
"""

import argparse
from pathlib import Path

from acceptance import in_process, local_parser, print_header, print_row

from adaptivespec import arguments
from adaptivespec.calibration import BINS, Reliability
from adaptivespec.config import GoodputPolicy
from adaptivespec.goodput import Goodput
from adaptivespec.local import LocalSystem
from adaptivespec.request import GenerationRequest


def answer(args: argparse.Namespace, kappa: float) -> Reliability:
    """The predictions made while all prompts were answered."""
    policy = Goodput(GoodputPolicy())
    settings = in_process(args.drafter, args.dtype, args.threads, args.concurrency)
    system = LocalSystem.load(settings, policy)
    template = system.tokenizer.apply_chat_template
    messages = [message for prompts in args.sets for message in prompts.messages]
    prompts = [template([{"role": "user", "content": message}]) for message in messages]
    system.generate(
        [GenerationRequest(prompt=p, max_tokens=args.max_tokens, kappa=kappa) for p in prompts]
    )
    return policy.reliability


def plot(found: dict[float, Reliability], file: Path) -> None:
    """The reliability diagram, and how many nodes it stands for."""
    from matplotlib import pyplot  # an extra, which nothing else here needs

    figure, (top, bottom) = pyplot.subplots(
        2, 1, figsize=(5, 6), sharex=True, height_ratios=[3, 1], layout="constrained"
    )
    for i, (kappa, reliability) in enumerate(found.items()):
        bins = reliability.bins
        label = f"kappa {kappa:g}: error {reliability.error:.3f}"
        predicted = [b.predicted for b in bins]
        top.plot(predicted, [b.accepted for b in bins], "o-", label=label)
        width = 0.8 / BINS / len(found)
        bottom.bar([b.low + (i + 0.5) * width for b in bins], [b.nodes for b in bins], width)
    top.plot([0, 1], [0, 1], "--", color="0.5", linewidth=1)
    top.set(ylabel="share accepted", xlim=(0, 1), ylim=(0, 1))
    top.legend()
    bottom.set(ylabel="nodes", xlabel="predicted acceptance")
    figure.savefig(file)


def main() -> None:
    parser = local_parser(__doc__)
    add = parser.add_argument
    add("--concurrency", type=arguments.positive, default=1, help="answers at once")
    add("--kappa", action="append", type=float, dest="kappas", help="default: 1")
    add("--plot", type=Path, metavar="FILE.svg")
    args = parser.parse_args()
    found = {kappa: answer(args, kappa) for kappa in args.kappas or [1.0]}
    print_header("kappa", "predicted", "nodes", "mean prediction", "accepted")
    for kappa, reliability in found.items():
        for b in reliability.bins:
            figures = (f"{b.predicted:.3f}", f"{b.accepted:.3f}")
            print_row(f"{kappa:g}", f"{b.low:.1f} to {b.high:.1f}", str(b.nodes), *figures)
        print_row(f"{kappa:g}", "all", "error", f"{reliability.error:.3f}", "")
    if args.plot:
        plot(found, args.plot)


if __name__ == "__main__":
    main()
