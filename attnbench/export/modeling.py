"""Language model of attnbench as a model of Hugging Face's transformers: logits, loss and `generate`.

It reads without padding: texts of one batch have one length. Its state, whatever its mixers carry from position to
position, takes the place of a cache of keys and values.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import GenerationMixin, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast

from attnbench.export.configuration import AttnbenchConfig
from attnbench.export.mixers import MIXERS
from attnbench.mixers.base import State
from attnbench.model.language_model import LanguageModel

FIRST_ROOM = 64
"""Positions that a new state has room for, beyond those that it reads at once."""


class ModelState:
    """State of every layer after `length` positions, with room for `room` of them; more room is made as it is needed.

    Args:
        dtype: of caches; recurrent states are float32 at least.
    """

    def __init__(self, model: LanguageModel, batch_size: int, room: int, dtype: torch.dtype) -> None:
        self.model, self.batch_size, self.dtype = model, batch_size, dtype
        self.room, self.length = room, 0
        self.layers: list[State] = model.init_state(batch_size, room, dtype)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Return the number of positions read."""
        return self.length

    def make_room(self, num_positions: int) -> None:
        """Make room for so many more positions: a longer cache begins with what the shorter one holds."""
        if self.length + num_positions <= self.room:
            return
        self.room = max(2 * self.room, self.length + num_positions)
        longer = self.model.init_state(self.batch_size, self.room, self.dtype)
        for layer, before in zip(longer, self.layers, strict=True):
            for tensor, short in zip(layer, before, strict=True):
                tensor[tuple(slice(size) for size in short.shape)] = short
        self.layers = longer

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Go on with these sequences of the batch, as a beam search asks; a tensor of one axis is a position."""
        for tensor in (tensor for layer in self.layers for tensor in layer if tensor.dim() > 1):
            tensor.copy_(tensor.index_select(0, beam_idx.to(tensor.device)))


class AttnbenchForCausalLM(PreTrainedModel, GenerationMixin):
    """Language model with the weights of a training by attnbench; without them there is none."""

    config_class = AttnbenchConfig
    base_model_prefix = "model"
    _is_stateful = True

    def __init__(self, config: AttnbenchConfig) -> None:
        super().__init__(config)
        self.model = LanguageModel(
            [MIXERS[mixer["class"]](**mixer["options"]) for mixer in config.mixers],
            vocabulary_size=config.vocab_size,
            dim=config.hidden_size,
            feed_forward_width=config.feed_forward_width,
        )
        self.post_init()

    def _init_weights(self, module: nn.Module) -> None:
        """Refuse weights that no file has given: transformers would fill them with numbers of its own."""
        missing = [
            name
            for name, parameter in module.named_parameters(recurse=False)
            if not getattr(parameter, "_is_hf_initialized", False)
        ]
        if missing:
            raise ValueError(
                f"{type(module).__name__}: no weights for {', '.join(missing)}; from_pretrained loads a whole model, "
                "and a new one is trained by attnbench"
            )

    @classmethod
    def _supports_default_dynamic_cache(cls) -> bool:
        return False

    def get_input_embeddings(self) -> nn.Module:
        return self.model.embedding

    def set_input_embeddings(self, value: nn.Module) -> None:
        raise NotImplementedError("the embedding gives the logits too, and cannot be exchanged")

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        past_key_values: ModelState | None = None,
        use_cache: bool | None = None,
        labels: Tensor | None = None,
        logits_to_keep: int = 0,
        return_dict: bool | None = None,
    ) -> CausalLMOutputWithPast | tuple[Tensor, ...]:
        """Return logits (B, T, vocabulary), or of the last `logits_to_keep` positions.

        Args:
            input_ids: (B, T), with a state those that follow what it has read.
            attention_mask: all ones, or none.
            past_key_values: updated in place, and returned; of None a new one is made where `use_cache` is true.
            labels: (B, T), `input_ids` say: the loss is of each position's next label, -100 being left out.

        Raises:
            ValueError: padding.
        """
        if past_key_values is None and attention_mask is not None and not bool(attention_mask.all()):
            raise ValueError("attention_mask: has zeros, and the model reads no padding; give texts of one length")
        (batch_size, length), positions_BL = input_ids.shape, None
        if past_key_values is None and use_cache:
            past_key_values = ModelState(self.model, batch_size, length + FIRST_ROOM, self.dtype)
        if past_key_values is not None:
            past_key_values.make_room(length)
        if past_key_values is not None and length == 1:
            logits_BC, past_key_values.layers = self.model.step(input_ids[:, 0], past_key_values.layers)
            logits_BTC = logits_BC[:, None]
        else:
            if logits_to_keep:
                last_L = torch.arange(max(length - logits_to_keep, 0), length, device=input_ids.device)
                positions_BL = last_L.expand(batch_size, -1)
            layers = None if past_key_values is None else past_key_values.layers
            logits_BTC, layers = self.model(input_ids, layers, positions_BL)
            if past_key_values is not None:
                past_key_values.layers = layers
        if past_key_values is not None:
            past_key_values.length += length
        loss = None
        if labels is not None:
            loss = F.cross_entropy(logits_BTC[:, :-1].flatten(0, 1).float(), labels[:, 1:].flatten())
        output = CausalLMOutputWithPast(loss=loss, logits=logits_BTC, past_key_values=past_key_values)  # pyright: ignore[reportArgumentType]
        return output if return_dict is not False else output.to_tuple()
