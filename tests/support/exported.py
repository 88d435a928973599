"""Exported models in a process where attnbench cannot be imported: `python tests/support/exported.py OUT FOLDER ...`.

Of each folder, which holds a file inputs.json ({"tokens": [[...]], "text": "..."}) beside what was exported, the
process writes OUT/<its parent's name>.json: logits as loaded and after save_pretrained, and what `generate` and the
tokenizer make of the inputs. All folders may have one name.
"""

import json
import sys
from pathlib import Path
from typing import Any

# Neither may be found: None in sys.modules makes an import of the name fail.
sys.modules["attnbench"] = sys.modules["triton"] = None  # pyright: ignore[reportArgumentType]

import torch  # noqa: E402
from safetensors.torch import load_file, save_file  # noqa: E402
from torch import Tensor  # noqa: E402
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache  # noqa: E402
from transformers.utils import logging  # noqa: E402

NUM_NEW = 70
"""More than a state has room for at first."""


def written(model: Any, tokens_BT: Tensor, **how: Any) -> list[list[int]]:
    made = model.generate(tokens_BT, attention_mask=torch.ones_like(tokens_BT), **{"max_new_tokens": 12, **how})
    return made[:, tokens_BT.shape[1] :].tolist()


def logits_of(model: Any, tokens_BT: Tensor) -> Tensor:
    with torch.no_grad():
        return model(tokens_BT).logits


def by_pieces(model: Any, tokens_BT: Tensor) -> Tensor:
    """Logits of a piece, a single position and the rest, through the state."""
    first, middle, rest = tokens_BT.split([5, 1, tokens_BT.shape[1] - 6], dim=1)
    state, parts = None, []
    with torch.no_grad():
        for part in (first, middle, rest):
            output = model(part, past_key_values=state, use_cache=True)
            state = output.past_key_values
            parts.append(output.logits)
    return torch.cat(parts, dim=1)


def refusals(model: Any, folder: Path) -> dict[str, str]:
    """Messages about padding, about what the model does not have, and about a file that lacks a weight, which
    transformers would fill by itself."""
    texts, weights = {}, load_file(folder / "model.safetensors")
    tokens_BT = torch.zeros(2, 4, dtype=torch.int64)
    padding_BT, state = torch.ones_like(tokens_BT).tril(2), model(tokens_BT, use_cache=True).past_key_values
    calls = {
        "padding": lambda: model(tokens_BT, attention_mask=padding_BT),
        "padding behind a state": lambda: model(tokens_BT, attention_mask=padding_BT, past_key_values=state),
        "cache": lambda: model(tokens_BT, past_key_values=DynamicCache()),
        "hidden states": lambda: model(tokens_BT, output_hidden_states=True),
        "both": lambda: model(tokens_BT, inputs_embeds=torch.zeros(2, 4, 1)),
        "resize": lambda: model.resize_token_embeddings(model.config.vocab_size + 50),
        "missing": lambda: AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True),
    }
    del weights["model.blocks.0.mixer_norm.weight"]
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    for name, call in calls.items():
        try:
            call()
        except (ValueError, NotImplementedError) as error:
            texts[name] = str(error)
    return texts


def look_at(folder: Path, out: Path) -> dict[str, Any]:
    inputs = json.loads((folder / "inputs.json").read_text())
    tokens_BT = torch.tensor(inputs["tokens"])
    model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)
    tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=True)
    again = out / folder.parent.name / folder.name
    model.save_pretrained(again)
    tokenizer.save_pretrained(again)
    reloaded = AutoModelForCausalLM.from_pretrained(again, trust_remote_code=True)
    token_ids = tokenizer(inputs["text"])["input_ids"]
    ids_again = AutoTokenizer.from_pretrained(again, trust_remote_code=True)(inputs["text"])["input_ids"]
    # A batch trains: the loss has a gradient in every weight.
    model(tokens_BT, labels=tokens_BT).loss.backward()
    return {
        "logits": logits_of(model, tokens_BT).tolist(),
        "reloaded": logits_of(reloaded, tokens_BT).tolist(),
        "embedded": model(inputs_embeds=model.get_input_embeddings()(tokens_BT)).logits.tolist(),
        "last": model(tokens_BT, logits_to_keep=torch.tensor([2, -1 + tokens_BT.shape[1]])).logits.tolist(),
        "pieces": by_pieces(reloaded, tokens_BT).tolist(),
        "written": written(reloaded, tokens_BT, max_new_tokens=NUM_NEW),
        "without_state": written(reloaded, tokens_BT, use_cache=False),
        "beams": written(reloaded, tokens_BT, num_beams=3),
        "beams_without_state": written(reloaded, tokens_BT, num_beams=3, use_cache=False),
        "token_ids": token_ids,
        "text": tokenizer.decode(token_ids),
        "ids_again": ids_again,
        "special": [tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id],
        "untrained": [name for name, x in model.named_parameters() if x.grad is None or not x.grad.any()],
        "modules": sorted({type(module).__module__.partition(".")[0] for module in reloaded.modules()}),
        "refused": refusals(reloaded, again),
        "after refusals": logits_of(reloaded, tokens_BT).tolist(),
    }


def main(out: Path, *folders: str) -> None:
    logging.set_verbosity_error()
    torch.set_num_threads(1)
    for name in folders:
        found = look_at(Path(name), out)
        (out / f"{Path(name).parent.name}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
