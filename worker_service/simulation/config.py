"""What a simulated worker pretends to be."""

from dataclasses import dataclass, field

from worker_service.errors import InvalidOption
from worker_service.simulation.cost import CostModel

DEFAULT_MAX_MODEL_LEN = 32768
DEFAULT_BLOCK_SIZE = 16


@dataclass(frozen=True, kw_only=True, slots=True)
class SimulationConfig:
    """The model's facts, the caches' sizes and the steps' cost."""

    model: str = "simulated"
    """The name the model is served under, unless another is given."""

    vocab_size: int = 32000
    """Token ids are below this."""

    eos_token_id: int = 2
    """The token that ends a sequence."""

    max_model_len: int = DEFAULT_MAX_MODEL_LEN
    """Most tokens of prompt and output together."""

    num_gpu_blocks: int = 4096
    """Blocks of the device cache that a profile finds room for."""

    num_cpu_blocks: int = 4096
    """Blocks of the host cache."""

    cost: CostModel = field(default_factory=CostModel)

    def __post_init__(self) -> None:
        limits = (
            ("max_model_len", self.max_model_len, 1),
            ("simulate_gpu_blocks", self.num_gpu_blocks, 1),
            ("simulate_cpu_blocks", self.num_cpu_blocks, 0),
        )
        for flag, got, least in limits:
            if got < least:
                raise InvalidOption(f"{flag}: expected at least {least}, got {got}")
        if not 1 <= self.vocab_size <= 2**31:
            raise InvalidOption(f"simulate_vocab_size: expected 1 to 2^31, got {self.vocab_size}")
        if not 0 <= self.eos_token_id < self.vocab_size:
            expected = f"a token id below {self.vocab_size}"
            got = self.eos_token_id
            raise InvalidOption(f"simulate_eos_token_id: expected {expected}, got {got}")
