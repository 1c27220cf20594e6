"""Write a target out as a Hugging Face folder, for programs that read nothing else.

    python infra/export_target.py FOLDER [--model smollm2]

The packaged model is a GGUF file, which other engines read in part or not at all. The folder holds
its weights in bf16, its configuration and its tokenizer. Then it is read back: the tensors must be
those of the source, and transformers must continue a chat as this project's own decoder does, in
fp32, where the two agree exactly.
"""

import argparse
from pathlib import Path

import torch
from bench_engine import transformers_model
from transformers import AutoModelForCausalLM, AutoTokenizer

from adaptivespec.config import load_settings
from adaptivespec.local import LocalSystem
from adaptivespec.models.loading import load_model
from adaptivespec.request import GenerationRequest
from adaptivespec.tokenizer import load_tokenizer

MESSAGE = [{"role": "user", "content": "Why is the sky blue? Answer in 3 sentences."}]
TOKENS = 48


def export(path: str, folder: Path) -> None:
    """Write the model at `path`, in any form that the project reads."""
    _, weights = load_model(path, torch.bfloat16)
    model = transformers_model(path, weights, torch.bfloat16)
    model.save_pretrained(folder)
    load_tokenizer(path).save(folder)


def check(path: str, folder: Path) -> None:
    """Raises SystemExit saying what differs between a model and what was written of it."""
    _, weights = load_model(path, torch.bfloat16)
    _, written = load_model(str(folder), torch.bfloat16)
    differing = [n for n, w in weights.items() if n not in written or not w.equal(written[n])]
    if differing or written.keys() - weights.keys():
        raise SystemExit(f"{folder}: other tensors: {differing or written.keys() - weights.keys()}")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    prompt = tokenizer.apply_chat_template(MESSAGE, add_generation_prompt=True)["input_ids"]
    own = load_tokenizer(path).apply_chat_template(MESSAGE)
    if prompt != own:
        raise SystemExit(f"{folder}: the prompt's tokens are {prompt}, not {own}")
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    theirs = model.generate(torch.tensor([prompt]), do_sample=False, max_new_tokens=TOKENS)
    settings = {"model": {"path": str(folder), "dtype": "float32"}, "drafter": None}
    request = GenerationRequest(prompt=prompt, max_tokens=TOKENS, mode="off")
    (deltas,) = LocalSystem.load(load_settings(settings)).generate([request])
    ours = [token for delta in deltas for token in delta.tokens]
    if (continued := theirs[0, len(prompt) :].tolist()) != ours:
        raise SystemExit(f"{folder}: transformers continues with {continued}, we with {ours}")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("--model", default="smollm2", help="folder, hub id, GGUF file or smollm2")
    args = parser.parse_args()
    export(args.model, args.folder)
    check(args.model, args.folder)
    print(f"{args.folder}: {args.model} in bf16, read back by transformers, tokens agree")


if __name__ == "__main__":
    main()
