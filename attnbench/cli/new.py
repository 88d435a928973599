"""attnbench new: files of a mixer of one's own, which keep the contract at once."""

import keyword
import re
from importlib.util import find_spec
from pathlib import Path
from string import Template

from attnbench.settings.errors import UserError
from attnbench.settings.schema import CONF

MIXER = Template('''\
"""$Class: a memory that every head forgets at a speed of its own."""

from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from attnbench.mixers.decay import DECAY_INIT, DecayInit, inverse_softplus, spread_steps
from attnbench.mixers.shell import RecurrentMixer
from attnbench.ops.common.precision import at_least_float32
from attnbench.ops.scalar.scalar_decay import SCALAR_DECAY
from attnbench.settings.options import option


class $Class(RecurrentMixer):
    """M_t = a M_(t-1) + k_t v_t^T,   y_t = M_t^T q_t / sqrt(K),   with a decay a for each head"""

    operator, decays = SCALAR_DECAY, True
    activation = True
    decay_init: DecayInit = option("spread", f"{DECAY_INIT} heads | paper: 1 position")

    no_weight_decay: ClassVar[frozenset[str]] = frozenset({"decay_bias"})

    def add_parts(self) -> None:
        self.decay_bias = nn.Parameter(torch.empty(self.heads))

    @torch.no_grad()
    def init_weights(self, generator: torch.Generator, num_branches: int) -> None:
        spread_H = inverse_softplus(spread_steps(self.heads))
        self.decay_bias.copy_(spread_H if self.decay_init == "spread" else torch.zeros_like(spread_H))

    def signals(self, x_BTD: Tensor) -> tuple[Tensor, None]:
        """Log a of every position, of a batch of 1 for all sequences, and no weight of what is written."""
        log_decay_H = -F.softplus(at_least_float32(self.decay_bias))
        return log_decay_H.expand(1, x_BTD.shape[1], self.heads), None
''')

OPTIONS = Template("""\
# $Class: a memory that every head forgets at a speed of its own.
_target_: $name.$Class
num_heads: null # null: model.dim / head_width
value_expansion: 1 # value channels a head, as a multiple of head_width
# torch | triton | fla; auto: triton on CUDA for heads of 16 to 128 key channels and any value channels, both a multiple
# of 16, otherwise torch
backend: auto
rotary_theta: null # base of rotary positions on query and key; null: none
conv_size: 0 # taps of a short convolution over query, key and value; 0: none
qk_norm: false # RMS norm of each head's query and key, with a learned gain
output_norm: false # RMS norm of each head's output, with a learned gain
output_gate: none # multiply the output by silu(gate(x)) or sigmoid(gate(x)): none | silu | sigmoid
decay_init: spread # half-lives of 1.7 to 693 positions over the heads | paper: 1 position
""")

PLAN = Template("""\
defaults: [demo] # everything else as plan=demo has it, its variants too
variants:
  $name: [attn=$name]
""")

TEST = Template('''\
"""$Class keeps the contract of a mixer: attnbench doctor checks every promise, here and on a GPU."""

import subprocess
import sys
from pathlib import Path


def test_the_contract_is_kept():
    command = [sys.executable, "-m", "attnbench", "doctor", "mixers=[$name]", "quick=true", "device=cpu"]
    done = subprocess.run(command, cwd=Path(__file__).parent, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
''')

FILES = {
    "$name.py": MIXER,
    "conf/attn/$name.yaml": OPTIONS,
    "conf/plan/$name.yaml": PLAN,
    "test_$name.py": TEST,
}
"""Files of a mixer, by their names."""

NEXT = """\
attnbench doctor 'mixers=[{0}]' quick=true   # the contract, in seconds
attnbench train attn={0} experiment=demo     # one model, in a minute
attnbench compare plan={0}                   # beside the mixers of plan=demo"""


def write_mixer(name: str, folder: Path) -> list[Path]:
    if not re.fullmatch(r"[a-z][a-z0-9_]*", name) or keyword.iskeyword(name):
        raise UserError(f"new mixer {name}: a name has lower-case letters, digits and _, as my_mixer")
    if (folder / "conf").resolve() == CONF:
        raise UserError("new mixer: this folder is attnbench's own; give the command in a folder of yours")
    if any((CONF / group / f"{name}.yaml").exists() for group in ("attn", "plan")) or len(name) == 1:
        raise UserError(f"new mixer {name}: attnbench has a mixer or a plan of this name, or it is too short")
    texts = {"name": name, "Class": "".join(word.capitalize() for word in name.split("_"))}
    files = {folder / Template(path).substitute(texts): content.substitute(texts) for path, content in FILES.items()}
    taken = [path for path in files if path.exists()]
    if taken or find_spec(name) is not None:
        what = taken[0] if taken else f"a module {name}"
        raise UserError(f"new mixer {name}: there is {what} already; choose another name")
    for path, content in files.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content, encoding="utf-8")
    return list(files)
