"""A Llama model that says what a script tells it to, so that agents and libraries can be led through a whole tool call.

Its weights are a table: token t is followed by the token that the script has after t, with certainty. Attention and MLP add
nothing. What is said depends on the last token of the prompt, and that the chat template chooses: by the tools on offer, and by
whether their result is in already. To the server it is a model folder like any other.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file

NAME = "scripted"
SAID = "Hello from the script."
HEARD = "The tool was heard."
NOTE = "note.txt"

CALLS: dict[str, dict[str, object]] = {
    "exec_command": {"cmd": f"cat {NOTE}"},
    "shell_command": {"command": f"cat {NOTE}"},
    "run_shell_command": {"command": f"cat {NOTE}", "is_background": False},
    "bash": {"command": f"cat {NOTE}"},
    "weather": {"city": "Oslo"},
}
"""Arguments by tool; of the tools on offer the first of these is called."""

HIDDEN = 256
HEAD = 32
FFN = 32
CONTEXT = 131_072
CALL_END = "}}\n</tool_call>"
SPELLING = str.maketrans(" \n", "\u0120\u010a")
SPECIAL = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}

CERTAIN = 16.0
"""Weight of the next token in the head; a normed state has 16 where it is not 0, so that others have odds of e^-256."""

TEMPLATE = """\
{%- for tool in tools or [] %}{{ tool | tojson }}
{% endfor %}
{%- for message in messages -%}
<|im_start|>{{ message.role }}
{{ message.content }}{% for call in message.tool_calls or [] %}<tool_call>
{{ call.function | tojson }}
</tool_call>{% endfor %}<|im_end|>
{% endfor %}<|im_start|>assistant
{% set choice = namespace(start='<|say|>') -%}
{%- if messages[-1].role == 'tool' %}{% set choice.start = '<|heard|>' %}{% else -%}
{%- for name in NAMES -%}{%- for tool in tools or [] -%}
{%- if tool.function.name == name and choice.start == '<|say|>' %}{% set choice.start = '<|call ' ~ name ~ '|>' %}{% endif -%}
{%- endfor -%}{%- endfor -%}
{%- endif -%}
{{ choice.start }}"""


def scripts() -> dict[str, str]:
    """What is said after each token that can end a prompt."""
    calls = {
        f"<|call {name}|>": "<tool_call>\n" + json.dumps({"name": name, "arguments": arguments})[:-2] + CALL_END
        for name, arguments in CALLS.items()
    }
    return {"<|say|>": SAID, "<|heard|>": HEARD, **calls}


def write(folder: Path, tokenizer: Path) -> Path:
    """The model in `folder`, which is made; `tokenizer`: the file of the embedded model's, which is added to.

    What begins a script is a special token, which clients cannot spell. Pieces of scripts are tokens that no text is cut into.
    """
    folder.mkdir(parents=True)
    contents = json.loads(tokenizer.read_text(encoding="utf-8"))
    vocabulary: dict[str, int] = contents["model"]["vocab"]
    end = next(int(token["id"]) for token in contents["added_tokens"] if token["content"] == "<|im_end|>")
    number = max(*vocabulary.values(), *(token["id"] for token in contents["added_tokens"]))
    follows: dict[int, int] = {}
    used = set(vocabulary)
    for start, text in scripts().items():
        number += 1
        contents["added_tokens"].append({**SPECIAL, "id": number, "content": start})
        vocabulary[start] = last = number
        for piece in pieces(text, used):
            if piece not in vocabulary:
                number += 1
                vocabulary[piece] = number
            follows[last] = vocabulary[piece]
            last = vocabulary[piece]
        follows[last] = end
    (folder / "tokenizer.json").write_text(json.dumps(contents), encoding="utf-8")
    template = TEMPLATE.replace("NAMES", json.dumps(list(CALLS)))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|im_end|>", "chat_template": template}))
    (folder / "config.json").write_text(json.dumps(_config(number + 1, end)))
    save_file(_weights(number + 1, end, follows), str(folder / "model.safetensors"))
    return folder


def pieces(text: str, used: set[str]) -> list[str]:
    """`text`, in the spelling of byte-level BPE, in pieces of 6 characters or more that are not in `used`, where they are put.

    So each is followed by one other. The end of a call is a piece that all of them share.
    """
    rest = text.removesuffix(CALL_END).translate(SPELLING)
    found: list[str] = []
    while rest:
        size = 6
        while size < len(rest) and (rest[:size] in used or len(rest) - size < 6):
            size += 1
        if rest[:size] in used:
            raise ValueError(f"the script {text!r} ends like another; word it otherwise")
        used.add(rest[:size])
        found.append(rest[:size])
        rest = rest[size:]
    return [*found, CALL_END.translate(SPELLING)] if text.endswith(CALL_END) else found


def _config(vocabulary: int, end: int) -> dict[str, object]:
    return {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_act": "silu", "dtype": "bfloat16",
        "vocab_size": vocabulary, "hidden_size": HIDDEN, "intermediate_size": FFN, "num_hidden_layers": 1,
        "num_attention_heads": 1, "num_key_value_heads": 1, "head_dim": HEAD, "max_position_embeddings": CONTEXT,
        "rope_theta": 10_000.0, "rms_norm_eps": 1e-6, "tie_word_embeddings": False, "bos_token_id": None, "eos_token_id": end,
    }  # fmt: skip


def _weights(vocabulary: int, end: int, follows: dict[int, int]) -> dict[str, torch.Tensor]:
    """A dimension of the state for each token that the script has, and one, the first, for all others: they end the answer."""
    if len(follows) >= HIDDEN:
        raise ValueError(f"the scripts have {len(follows)} tokens, there is room for {HIDDEN - 1}")

    def zeros(*shape: int) -> torch.Tensor:
        return torch.zeros(shape, dtype=torch.bfloat16)

    embedding, head, ones = zeros(vocabulary, HIDDEN), zeros(vocabulary, HIDDEN), torch.ones(HIDDEN, dtype=torch.bfloat16)
    embedding[:, 0] = 1
    head[end, 0] = CERTAIN
    for place, (token, successor) in enumerate(follows.items(), 1):
        embedding[token, 0], embedding[token, place] = 0, 1
        head[successor, place] = CERTAIN
    layer = "model.layers.0"
    return {
        "model.embed_tokens.weight": embedding, "lm_head.weight": head, "model.norm.weight": ones,
        f"{layer}.input_layernorm.weight": ones.clone(), f"{layer}.post_attention_layernorm.weight": ones.clone(),
        f"{layer}.self_attn.q_proj.weight": zeros(HEAD, HIDDEN), f"{layer}.self_attn.k_proj.weight": zeros(HEAD, HIDDEN),
        f"{layer}.self_attn.v_proj.weight": zeros(HEAD, HIDDEN), f"{layer}.self_attn.o_proj.weight": zeros(HIDDEN, HEAD),
        f"{layer}.mlp.gate_proj.weight": zeros(FFN, HIDDEN), f"{layer}.mlp.up_proj.weight": zeros(FFN, HIDDEN),
        f"{layer}.mlp.down_proj.weight": zeros(HIDDEN, FFN),
    }  # fmt: skip
