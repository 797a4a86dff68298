"""Write tests/golden/smollm2_logits.json: what an independent implementation makes of the embedded model.

Needs the `golden` extra (transformers). Text to ids goes through transformers' own reading of the GGUF file where one is
given, so tokenizer and weights are checked against a second conversion too:

    python scripts/make_model_goldens.py MODEL_FOLDER [MODEL.gguf]
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
import transformers

TARGET = Path(__file__).parent.parent / "tests" / "golden" / "smollm2_logits.json"
NUM_TOP = 8
NUM_NEW = 32

CODE = '''def parse(line: str) -> dict[str, int]:
    """Read `key=value` pairs; 12345 is a number, "naïve 🦙" is not."""
    pairs = [part.split("=", 1) for part in line.split() if "=" in part]
    return {key: int(value) for key, value in pairs'''
CHAT = [
    {"role": "system", "content": "You are a helpful assistant."},
    {"role": "user", "content": "What is the capital of France? Answer in one word."},
]
PROMPTS: dict[str, str | list[dict[str, str]]] = {
    "fact": "The capital of France is",
    "code": CODE,
    "chat": CHAT,
    "long": "\n".join(
        f"{number}. The number {number} times {number + 1} is {number * (number + 1)}." for number in range(1, 19)
    ),
}


def record(model: Any, tokenizer: Any, prompt: str | list[dict[str, str]]) -> dict[str, Any]:
    """Ids, the best logits at four positions, and the greedy continuation of one prompt."""
    text = prompt
    if not isinstance(prompt, str):
        text = tokenizer.apply_chat_template(prompt, tokenize=False, add_generation_prompt=True)
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    with torch.inference_mode():
        logits = model(torch.tensor([ids])).logits[0]
        output = model.generate(torch.tensor([ids]), max_new_tokens=NUM_NEW, do_sample=False, eos_token_id=None, pad_token_id=0)
        whole = model(output).logits[0]
    chosen = whole[len(ids) - 1 : -1].topk(2).values
    positions = sorted({0, len(ids) // 3, 2 * len(ids) // 3, len(ids) - 1})
    top = [logits[at].topk(NUM_TOP) for at in positions]
    return {
        "text": text,
        "ids": ids,
        "positions": [
            {"at": at, "ids": best.indices.tolist(), "logits": [round(value, 5) for value in best.values.tolist()]}
            for at, best in zip(positions, top, strict=True)
        ],
        "greedy": output[0, len(ids) :].tolist(),
        "margins": [round(float(pair[0] - pair[1]), 5) for pair in chosen],
    }


def check_conversion(folder: str, gguf: Path, model: Any) -> None:
    """Weights as transformers reads them from the GGUF file, rounded to bf16, are those of the folder."""
    other = transformers.AutoModelForCausalLM.from_pretrained(str(gguf.parent), gguf_file=gguf.name, dtype=torch.float32)
    theirs = dict(other.named_parameters())
    for name, ours in model.named_parameters():
        if not torch.equal(ours, theirs[name].to(torch.bfloat16).float()):
            raise SystemExit(f"{folder}: {name} differs from {gguf}")


def main() -> int:
    """Make the file."""
    folder = sys.argv[1]
    torch.set_num_threads(1)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    if len(sys.argv) > 2:
        gguf = Path(sys.argv[2])
        check_conversion(folder, gguf, model)
        tokenizer = transformers.AutoTokenizer.from_pretrained(str(gguf.parent), gguf_file=gguf.name)
    golden = {
        "made_by": f"transformers {transformers.__version__}, torch {torch.__version__}, float32, eager attention",
        "prompts": {name: record(model, tokenizer, prompt) for name, prompt in PROMPTS.items()},
    }
    TARGET.write_text(json.dumps(golden, ensure_ascii=False) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
