"""attnbench's language model for Hugging Face's transformers: configuration, logits, loss and `generate`.

Texts of a batch have one length, without padding. The state of the mixers takes the place of a key-value cache.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import GenerationMixin, PretrainedConfig, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast

from attnbench.export.mixers import MIXERS
from attnbench.mixers.base import State
from attnbench.model.language_model import LanguageModel

SPARE_POSITIONS = 64
"""Positions that a new state has space for, beyond those that it reads at once."""


class AttnbenchConfig(PretrainedConfig):
    """Settings that build the model.

    In the same file as the model, because transformers compares files by content and finds a model's class by that of
    its configuration: with a separate file, two exported models would share the configuration and run the first one's
    code.

    Args:
        vocab_size: symbols of the embedding.
        hidden_size: model width.
        feed_forward_width: hidden channels of the SwiGLU; 0 for none.
        norm: of the residual stream, layer or none for RMS norm.
        untied: the logits have weights of their own.
        mixers: one per layer, {"class": "GatedDeltaNet", "options": {...}}, with all options of its constructor.
        trained_length: positions of training sequences.
    """

    model_type = "attnbench"

    def __init__(
        self,
        vocab_size: int = 1,
        hidden_size: int = 1,
        feed_forward_width: int = 0,
        mixers: list[dict[str, Any]] | None = None,
        trained_length: int = 1,
        norm: str | None = None,
        untied: bool = False,
        **kwargs: Any,
    ) -> None:
        self.vocab_size, self.hidden_size, self.feed_forward_width = vocab_size, hidden_size, feed_forward_width
        self.mixers, self.norm, self.untied = mixers or [], norm, untied
        self.num_hidden_layers, self.trained_length = len(self.mixers), trained_length
        # Embedding and logits share one parameter or have one each, so there is nothing to tie.
        super().__init__(**{**kwargs, "tie_word_embeddings": False})


class ModelState:
    """State of every layer after `length` positions, with space for `capacity`, which grows as needed.

    Args:
        dtype: of caches; recurrent states have at least float32.
    """

    def __init__(self, model: LanguageModel, batch_size: int, capacity: int, dtype: torch.dtype) -> None:
        self.model, self.batch_size, self.dtype = model, batch_size, dtype
        self.capacity, self.length = capacity, 0
        self.layers: list[State] = model.init_state(batch_size, capacity, dtype)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self.length

    def reserve(self, num_positions: int) -> None:
        if self.length + num_positions <= self.capacity:
            return
        self.capacity = max(2 * self.capacity, self.length + num_positions)
        longer = self.model.init_state(self.batch_size, self.capacity, self.dtype)
        for layer, before in zip(longer, self.layers, strict=True):
            for tensor, short in zip(layer, before, strict=True):
                tensor[tuple(slice(size) for size in short.shape)] = short
        self.layers = longer

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Select sequences of the batch for beam search; tensors with one axis are positions."""
        for tensor in (tensor for layer in self.layers for tensor in layer if tensor.dim() > 1):
            tensor.copy_(tensor.index_select(0, beam_idx.to(tensor.device)))


class AttnbenchForCausalLM(PreTrainedModel, GenerationMixin):
    """Language model with the weights of a training by attnbench."""

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
            norm=config.norm,
            untied=config.untied,
        )
        self.post_init()

    def _init_weights(self, module: nn.Module) -> None:
        """Refuse missing weights, which transformers would initialize at random."""
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
        raise NotImplementedError("the embedding cannot be exchanged: it may also give the logits")

    def resize_token_embeddings(
        self, new_num_tokens: int | None = None, pad_to_multiple_of: int | None = None, mean_resizing: bool = True
    ) -> nn.Module:
        """Raise NotImplementedError for another size than the vocabulary's."""
        size = self.config.vocab_size
        if (new_num_tokens or size) != size or size % (pad_to_multiple_of or 1):
            raise NotImplementedError(
                f"resize_token_embeddings: the model has the {size} symbols of its training and takes no others"
            )
        return self.get_input_embeddings()

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        past_key_values: ModelState | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        output_attentions: bool | None = None,
        output_hidden_states: bool | None = None,
        return_dict: bool | None = None,
    ) -> CausalLMOutputWithPast | tuple[Tensor, ...]:
        """Return logits (B, T, vocabulary), or those of the last `logits_to_keep` positions.

        Args:
            input_ids: (B, T); with a state, the tokens after those in the state.
            attention_mask: all ones, or None.
            past_key_values: state of this model, updated in place and returned; with None and `use_cache`, a new one.
            inputs_embeds: (B, T, hidden_size) in place of `input_ids`.
            labels: (B, T), such as `input_ids`: the loss is the mean over next labels, without those that are -100.
            logits_to_keep: a number, or positions (L,).
            output_attentions, output_hidden_states: not available.

        Raises:
            ValueError: padding, another model's state, or an unavailable output.
        """
        if input_ids is not None and inputs_embeds is None:
            x_BTD = self.model.embed(input_ids)
        elif inputs_embeds is not None and input_ids is None:
            x_BTD = inputs_embeds
        else:
            raise ValueError("input_ids, inputs_embeds: give one of the two")
        if output_attentions or output_hidden_states:
            name = "output_attentions" if output_attentions else "output_hidden_states"
            raise ValueError(f"{name}=True: the model returns only logits, loss and state; leave it out")
        if attention_mask is not None and not bool(attention_mask.all()):
            raise ValueError("attention_mask: has zeros, but the model reads no padding; give texts of one length")
        if past_key_values is not None and not isinstance(past_key_values, ModelState):
            kind = type(past_key_values).__name__
            raise ValueError(f"past_key_values: is a {kind}; give past_key_values of an earlier output, or None")
        (batch_size, length, _), positions_BL = x_BTD.shape, None
        if past_key_values is None and use_cache:
            past_key_values = ModelState(self.model, batch_size, length + SPARE_POSITIONS, self.dtype)
        if past_key_values is not None:
            past_key_values.reserve(length)
        if past_key_values is not None and length == 1:
            logits_BC, past_key_values.layers = self.model.step_from(x_BTD[:, 0], past_key_values.layers)
            logits_BTC = logits_BC[:, None]
        else:
            if isinstance(logits_to_keep, Tensor) or logits_to_keep:
                positions_BL = _positions(logits_to_keep, length).to(x_BTD.device).expand(batch_size, -1)
            layers = None if past_key_values is None else past_key_values.layers
            x_BTD, layers = self.model.through(x_BTD, layers, positions_BL)
            logits_BTC = self.model.logits(x_BTD)
            if past_key_values is not None and layers is not None:
                past_key_values.layers = layers
        if past_key_values is not None:
            past_key_values.length += length
        loss = None
        if labels is not None:
            loss = F.cross_entropy(logits_BTC[:, :-1].flatten(0, 1).float(), labels[:, 1:].flatten())
        output = CausalLMOutputWithPast(loss=loss, logits=logits_BTC, past_key_values=past_key_values)  # pyright: ignore[reportArgumentType]
        return output if return_dict is not False else output.to_tuple()


def _positions(logits_to_keep: int | Tensor, length: int) -> Tensor:
    if isinstance(logits_to_keep, Tensor):
        return logits_to_keep
    return torch.arange(max(length - logits_to_keep, 0), length)
