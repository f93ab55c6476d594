"""The extension module in ``csrc``, which is missing if the package was built without a C compiler."""

import numpy as np

Arrays = tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]

class Network:
    def __new__(cls, layers: list[Arrays | str | int]) -> Network: ...
    def pack(self) -> None: ...
    def forward(self, x: np.ndarray, out: np.ndarray, /) -> bool: ...
    def latents(self, out: np.ndarray, /) -> None: ...
    def backward(self, d_out: np.ndarray, add: bool, /) -> None: ...

class Watch:
    def __new__(cls, arrays: list[np.ndarray]) -> Watch: ...
    def has_changed(self) -> bool: ...

class Threads:
    def __new__(cls, n: int) -> Threads: ...
    def forward(self, parts: list[tuple[Network, np.ndarray, np.ndarray]], /) -> None: ...
    def backward(self, parts: list[tuple[Network, np.ndarray]], add: bool, /) -> None: ...

class Adam:
    def __new__(cls, tensors: list[Arrays]) -> Adam: ...
    def norm(self) -> float: ...
    def step(
        self, n: float, scale: float, lr: float, beta1: float, beta2: float, eps: float, weight_decay: float, /
    ) -> None: ...

class Loss:
    def __new__(
        cls,
        family: str,
        choices: tuple[int, ...],
        log_std: np.ndarray | None,
        d_log_std: np.ndarray | None,
        columns: tuple[np.ndarray | None, ...],
        bounds: tuple[np.ndarray, ...],
        is_spo: bool,
        is_max: bool,
        clip_range: float,
        dual_clip: float,
        value_limit: float,
        value_scale: float,
        vf_coef: float,
        ent_coef: float,
        kl_coef: float,
        bounds_coef: float,
        bounds_limit: float,
        max_concentration: float,
        use_expln: bool,
        epsilon: float,
    ) -> Loss: ...
    def add(
        self,
        start: int,
        size: int,
        outputs: np.ndarray,
        values: np.ndarray,
        d_outputs: np.ndarray,
        d_values: np.ndarray,
        add: bool,
        /,
    ) -> float: ...

class Steps:
    def __new__(
        cls,
        actor: Network,
        critic: Network,
        loss: Loss,
        adam: Adam,
        features: np.ndarray,
        invalid: np.ndarray | None,
        block: int,
    ) -> Steps: ...
    def make(
        self,
        ends: tuple[int, ...],
        first: int,
        n: float,
        batch_size: int,
        max_norm: float,
        max_kl: float,
        value_std: float,
        value_mean: float,
        lr: float,
        beta1: float,
        beta2: float,
        eps: float,
        weight_decay: float,
        /,
    ) -> list[float]: ...

def gae(
    rewards: np.ndarray,
    values: np.ndarray,
    episode_starts: np.ndarray,
    last_values: np.ndarray,
    dones: np.ndarray,
    gamma: float,
    gae_lambda: float,
    advantages: np.ndarray,
    /,
) -> None: ...
def normalize(advantages: np.ndarray, size: int, out: np.ndarray, /) -> None: ...
def sample_beta(outputs: np.ndarray, noise: np.ndarray, max_concentration: float, out: np.ndarray, /) -> None: ...
def use(name: str, /) -> None: ...
def available() -> list[str]: ...
