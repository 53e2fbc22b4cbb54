"""What is known of each architecture of GGUF files; a table, which is in `classes.txt`."""

from dataclasses import dataclass, replace
from pathlib import Path

ENCODERS = ("bert", "nomic_bert", "modernbert")
"""`model_type` of encoders."""

LATENT = (
    *("deepseek_v2", "deepseek_v3", "deepseek_v32", "glm_moe_dsa", "youtu", "kimi_linear"),
    *("mistral4", "minicpm3"),
)
"""`model_type` of models with latent attention."""


@dataclass(frozen=True, slots=True)
class Architecture:
    """A row of the table."""

    name: str
    """`general.architecture`."""
    class_name: str
    """Class of the model in `transformers`."""
    kind: str
    """Its `model_type`."""
    traits: frozenset[str] = frozenset()
    window_period: int | None = None

    @classmethod
    def parse(cls, row: str) -> "Architecture":
        """An architecture from a row of `classes.txt`."""
        name, class_name, kind, *words = row.split()
        traits = {word.partition("=")[0]: word.partition("=")[2] for word in words}
        period = traits.get("windows")
        return cls(name, class_name, kind, frozenset(traits), int(period) if period else None)

    def as_model(self, class_name: str, kind: str) -> "Architecture":
        """The same architecture with another model's class and `model_type`."""
        return replace(self, class_name=class_name, kind=kind)

    @property
    def is_encoder(self) -> bool:
        """Whether its models are those of `ENCODERS`, which make no text."""
        return self.kind in ENCODERS

    @property
    def is_causal(self) -> bool:
        """Whether tokens attend only to those before them."""
        return not self.is_encoder and "both-ways" not in self.traits


_ROWS = Path(__file__).with_name("classes.txt").read_text(encoding="utf-8").splitlines()
ARCHITECTURES = {
    row.name: row for row in map(Architecture.parse, _ROWS) if not row.name.startswith("#")
}
"""By `general.architecture`."""

MISTRAL = ("MistralForCausalLM", "mistral")
MIXTRAL = ("MixtralForCausalLM", "mixtral")
"""The models with a sliding window, and with experts, whose architecture is `llama`, too."""
OLMO3 = ("Olmo3ForCausalLM", "olmo3")
"""The model with a sliding window whose architecture is `olmo2`."""
DEEPSEEK2 = ("DeepseekV2ForCausalLM", "deepseek_v2")
MISTRAL4 = ("Mistral4ForCausalLM", "mistral4")
YOUTU = ("YoutuForCausalLM", "youtu")
"""The models with scores by softmax, also with weights of experts that add up to 1 (Mistral Large
3), and without experts, whose architecture is `deepseek2`."""
FALCON_MAMBA = ("FalconMambaForCausalLM", "falcon_mamba")
"""The model with norms before the recurrence whose architecture is `mamba`."""


def architecture_of(model_type: str) -> str | None:
    """`general.architecture` of files of models of this `model_type`; None if there are none."""
    found = {row.kind: name for name, row in reversed(ARCHITECTURES.items())}
    found |= {MISTRAL[1]: "llama", MIXTRAL[1]: "llama", OLMO3[1]: "olmo2"}
    found[FALCON_MAMBA[1]] = "mamba"
    return found.get(model_type)
