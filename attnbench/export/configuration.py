"""Configuration of a language model of attnbench for Hugging Face's transformers."""

from typing import Any

from transformers import PretrainedConfig


class AttnbenchConfig(PretrainedConfig):
    """Settings that build the model again.

    Args:
        vocab_size: symbols of the embedding.
        hidden_size: model width.
        feed_forward_width: hidden channels of the SwiGLU; 0 for none.
        mixers: one a layer, {"class": "GatedDeltaNet", "options": {...}}, the options all that its constructor takes.
        trained_length: positions of the sequences that it was trained on.
    """

    model_type = "attnbench"

    def __init__(
        self,
        vocab_size: int = 1,
        hidden_size: int = 1,
        feed_forward_width: int = 0,
        mixers: list[dict[str, Any]] | None = None,
        trained_length: int = 1,
        **kwargs: Any,
    ) -> None:
        self.vocab_size, self.hidden_size, self.feed_forward_width = vocab_size, hidden_size, feed_forward_width
        self.mixers = mixers or []
        self.num_hidden_layers, self.trained_length = len(self.mixers), trained_length
        # Embedding and logits share one parameter, so that there are no two to tie.
        super().__init__(**{**kwargs, "tie_word_embeddings": False})
