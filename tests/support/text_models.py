"""Text models that `transformers` has only inside of multimodal ones, as models of their own."""

import importlib
from functools import cache
from typing import Any, ClassVar

_TEXT_MODELS = {
    "Step3p5ForCausalLM": ("step3p7", "Step3p7"),
    "Glm5NextForCausalLM": ("glm5_next", "Glm5Next"),
    "MuseGlimmerForCausalLM": ("muse_glimmer", "MuseGlimmer"),
}
"""By the class name that their checkpoints have: the module, and the beginning of class names."""


def class_of(config: Any) -> Any:
    """The class of the model with this configuration of `transformers`, which has an LM head."""
    import transformers

    name = (config.architectures or [None])[0]
    if name in _TEXT_MODELS:
        return _text_class(name)
    if name is not None:
        return getattr(transformers, name)
    return transformers.MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]


@cache
def _text_class(name: str) -> Any:
    """A text model and an LM head; `AutoModelForCausalLM` knows it, too."""
    import torch
    from torch import nn
    from transformers import AutoModelForCausalLM, GenerationMixin
    from transformers.modeling_outputs import CausalLMOutputWithPast

    folder, start = _TEXT_MODELS[name]
    module = importlib.import_module(f"transformers.models.{folder}.modeling_{folder}")
    base, text = (getattr(module, f"{start}{kind}") for kind in ("PreTrainedModel", "TextModel"))
    config_type = getattr(module, f"{start}TextConfig")

    class TextModel(base, GenerationMixin):  # type: ignore[misc]
        config_class = config_type
        config: config_type
        _tied_weights_keys: ClassVar = {"lm_head.weight": "model.embed_tokens.weight"}

        def __init__(self, config: Any) -> None:
            super().__init__(config)
            self.model = text(config)
            self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
            self.post_init()

        def forward(
            self,
            input_ids: Any = None,
            attention_mask: Any = None,
            position_ids: Any = None,
            cache: Any = None,
            use_cache: Any = None,
            **others: Any,
        ) -> Any:
            given = {"attention_mask": attention_mask, "position_ids": position_ids}
            found = self.model(input_ids, cache=cache, use_cache=use_cache, **given)
            logits = self.lm_head(found.last_hidden_state)
            if (cap := getattr(self.config, "final_logit_softcapping", None)) is not None:
                logits = torch.tanh(logits * self.config.output_multiplier / cap) * cap
            return CausalLMOutputWithPast(logits=logits, cache=found.cache)

    TextModel.__name__ = TextModel.__qualname__ = name
    AutoModelForCausalLM.register(config_type, TextModel)
    _read_published_names(config_type.model_type, folder)
    return TextModel


def _read_published_names(model_type: str, whole: str) -> None:
    """Make the text model read and write the names that it has in the multimodal one."""
    from transformers import conversion_mapping

    known = conversion_mapping.get_checkpoint_conversion_mapping(whole) or []
    if conversion_mapping.get_checkpoint_conversion_mapping(model_type) is None:
        of_text = [
            change
            for change in known
            if not any("model." in pattern for pattern in change.target_patterns)
        ]
        conversion_mapping.register_checkpoint_conversion_mapping(model_type, of_text)
