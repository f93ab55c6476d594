"""On CUDA: training, saving there and loading on the CPU."""

import numpy as np
import pytest
import torch as th
from stable_baselines3.common.vec_env import VecNormalize
from support.engines import assert_same_update
from support.memory import SETTINGS as WINDOWS
from support.memory import evaluated
from support.memory import make as make_transformer
from support.options import SINGLE
from support.parity import assert_equal
from support.torch_envs import TorchPendulum
from support.toys import DICT, IMAGE, make_toys
from torch.utils._pytree import tree_leaves, tree_map_only

from sb3_ppo_ext import PPOExt, TorchVecEnv
from sb3_ppo_ext.distributions import BoundedBetaDistribution, TanhGaussianDistribution, kl_divergence
from sb3_ppo_ext.engines.compiled import CompiledAct
from sb3_ppo_ext.rollout.bootstrap import terminal_values

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not th.cuda.is_available(), reason="no CUDA"),
    pytest.mark.filterwarnings("ignore:You are trying to run PPOExt on the GPU"),
]
SMALL = dict(n_steps=16, batch_size=16, n_epochs=2, seed=0)
POLICIES = [
    ("MlpPolicy", {}, {}),
    ("MlpPolicy", {}, dict(use_sde=True)),
    ("CnnPolicy", dict(observation_space=IMAGE), {}),
    ("MultiInputPolicy", dict(observation_space=DICT), {}),
    ("MlpTransformerPolicy", {}, dict(policy_kwargs=dict(context_length=6, use_last_action=True))),
    ("MlpTransformerPolicy", {}, dict(policy_kwargs=dict(context_length=23), vtrace=True)),
    ("CnnTransformerPolicy", dict(observation_space=IMAGE), dict(policy_kwargs=dict(context_length=6))),
    ("MultiInputTransformerPolicy", dict(observation_space=DICT), dict(policy_kwargs=dict(share_features_extractor=False))),
]
RECURRENT = [
    ("MlpLstmPolicy", {}, dict(policy_kwargs=dict(lstm_hidden_size=8))),
    (
        "MultiInputLstmPolicy",
        dict(observation_space=DICT),
        dict(policy_kwargs=dict(lstm_hidden_size=8, rnn="gru"), vtrace=True),
    ),
]


@pytest.fixture(autouse=True)
def _in_float32(monkeypatch):
    """Convolutions are computed in float32, as on the CPU, instead of TF32, whose rounding is a thousandth."""
    monkeypatch.setattr(th.backends.cudnn, "allow_tf32", False)


def devices(model):
    optimizer_state = (value for state in model.policy.optimizer.state.values() for value in state.values())
    tensors = [*model.policy.parameters(), *(value for value in optimizer_state if value.ndim > 0)]
    return {tensor.device.type for tensor in tensors}


@pytest.mark.parametrize(("policy", "spaces", "options"), POLICIES + RECURRENT)
def test_train_save_and_load_on_the_cpu(policy, spaces, options, tmp_path):
    """Parameters and optimiser are on the GPU; the zip goes on wherever it is loaded."""
    model = PPOExt(policy, make_toys(n_envs=3, p_end=0.0, **spaces), device="cuda", **SMALL, **options).learn(96)
    assert devices(model) == {"cuda"}
    model.save(tmp_path / "model")
    observation = model.env.reset()
    expected, _ = model.predict(observation, deterministic=True)
    for device in ("cpu", "cuda"):
        loaded = PPOExt.load(tmp_path / "model", env=make_toys(n_envs=3, **spaces), device=device)
        np.testing.assert_allclose(loaded.predict(observation, deterministic=True)[0], expected, rtol=1e-3, atol=1e-4)
        assert devices(loaded.learn(48)) == {device}


@pytest.mark.parametrize(
    "options", [options for options in SINGLE if options.get("backend") not in ("fused", "native")], ids=str
)
def test_each_option(options, tmp_path):
    """Each option trains on the GPU, and goes on from its zip on both devices."""
    env = dict(n_envs=2, length=5)
    model = PPOExt("MlpPolicy", make_toys(**env), device="cuda", **{**SMALL, **options}).learn(64)
    assert all(np.isfinite(value) for value in model.logger.name_to_value.values())
    model.save(tmp_path / "model")
    for device in ("cpu", "cuda"):
        loaded = PPOExt.load(tmp_path / "model", env=make_toys(**env), device=device).learn(32)
        assert devices(loaded) == {device}
        assert all(th.isfinite(parameter).all() for parameter in loaded.policy.parameters())


COMPILED = [
    *(
        (policy, spaces, options, 1e-2 if "Cnn" in policy or "Multi" in policy else 1e-3)
        for policy, spaces, options in POLICIES
    ),
    ("MlpPolicy", {}, dict(accumulate_grad=2, batch_size=5, max_clip_fraction=0.5, optimizer="adamw"), 1e-3),
    ("MlpPolicy", {}, dict(action_dist="beta", kl_coef=0.5, clip_range_vf=0.1, bounds_coef=0.0, ent_coef=0.1), 1e-3),
    ("MlpPolicy", {}, dict(bounds_coef=0.1, bounds_limit=0.0, surrogate="spo", target_kl=0.1, priority_alpha=0.5), 1e-3),
]


@pytest.mark.integration
@pytest.mark.parametrize(("policy", "spaces", "options", "rtol"), COMPILED)
def test_compiled_update(policy, spaces, options, rtol):
    """
    A compiled update equals the reference's, what is logged included, although each run of a CUDA graph writes over the one
    before.
    """
    skipped = th._dynamo.utils.counters["inductor"]["cudagraph_skips"]
    assert_same_update(rtol, "compile", policy=policy, env=spaces, device="cuda", **options)
    assert th._dynamo.utils.counters["inductor"]["cudagraph_skips"] == skipped


@pytest.mark.integration
def test_compiled_training(tmp_path):
    """Several updates need one compilation, also with a smaller last minibatch, and the zip goes on on both devices."""
    options = dict(backend="compile", n_steps=16, n_epochs=2, batch_size=12, clip_range="lin_0.2", ent_coef="lin_0.01")
    model = PPOExt("MlpPolicy", make_toys(), device="cuda", **options).learn(64)
    before = th._dynamo.utils.counters["stats"]["unique_graphs"]
    model.learn(96, reset_num_timesteps=False)
    assert th._dynamo.utils.counters["stats"]["unique_graphs"] == before
    model.save(tmp_path / "model")
    for device in ("cpu", "cuda"):
        loaded = PPOExt.load(tmp_path / "model", env=make_toys(), device=device, backend="eager").learn(32)
        assert devices(loaded) == {device}


@pytest.fixture
def replayed(monkeypatch):
    """In the place of `torch.compile`: functions whose outputs the next call overwrites, as those of a CUDA graph."""

    def replaying(function, **kwargs):
        outputs: list[th.Tensor] = []

        def call(*arguments):
            for output in outputs:
                output.fill_(np.nan if output.is_floating_point() else 77)
            results = tree_map_only(th.Tensor, th.clone, function(*arguments))
            outputs[:] = [leaf for leaf in tree_leaves(results) if isinstance(leaf, th.Tensor)]
            return results

        return call

    monkeypatch.setattr(th, "compile", replaying)
    monkeypatch.setattr("torch.utils._triton.has_triton", lambda: True)
    monkeypatch.setattr(th.compiler, "cudagraph_mark_step_begin", lambda: None)


@pytest.mark.usefixtures("replayed")
@pytest.mark.parametrize("options", [{}, dict(action_dist="beta", kl_coef=0.5, kl_target=0.01, priority_alpha=0.5)], ids=str)
def test_outputs_of_graphs_are_kept(options):
    """Gradients, metrics, actions and values are copied before the next run of a CUDA graph writes over them."""
    assert_same_update(1e-3, "compile", device="cuda", **options)
    model = PPOExt("MlpPolicy", make_toys(), device="cuda", **SMALL, **options)
    act, observations = CompiledAct(model.policy), th.zeros(2, 3, device="cuda")
    with th.no_grad():
        first, _ = act(observations), act(observations + 1.0)
    assert all(th.isfinite(part).all() for part in first)


def test_first_rollout_equals_the_cpu(tmp_path):
    """The same policy and actions give the same values, log probabilities and advantages, to float rounding."""
    PPOExt("MlpPolicy", make_toys(), device="cpu", **SMALL).save(tmp_path / "model")
    values = []
    for device in ("cpu", "cuda"):
        model = PPOExt.load(tmp_path / "model", env=make_toys(n_envs=3, p_end=0.0), device=device)
        observations = th.as_tensor(np.linspace(-1, 1, 30, dtype=np.float32).reshape(10, 3), device=device)
        actions = th.zeros(10, 2, device=device)
        with th.no_grad():
            values.append([part.cpu() for part in model.policy.evaluate_actions(observations, actions)])
    for on_cpu, on_cuda in zip(*values, strict=True):
        th.testing.assert_close(on_cpu, on_cuda, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("setting", WINDOWS)
def test_transformer_sees_the_same_windows(setting):
    """A transformer policy sees the same windows while collecting, by its cache, and in the update."""
    model = make_transformer(**{**WINDOWS[setting], "device": "cuda", "learning_rate": 1e-30}).learn(64)
    buffer = model.rollout_buffer
    collected = (array.reshape(model.n_envs, -1).T for array in (buffer.values, buffer.log_probs))
    for of_update, while_collecting in zip(evaluated(model), collected, strict=True):
        np.testing.assert_allclose(of_update, while_collecting, rtol=1e-3, atol=1e-4)


def test_bootstrap_in_one_batch():
    """Truncations of several environments in one step are bootstrapped with the values of their last observations."""
    model = PPOExt("MlpPolicy", make_toys(n_envs=3, p_end=0.0), device="cuda", **SMALL)
    observations = [model.observation_space.sample() for _ in range(4)]
    batched, single = (
        terminal_values(model.policy, model.rollout_buffer, range(4), observations, batched).values
        for batched in (True, False)
    )
    th.testing.assert_close(batched, single, rtol=1e-4, atol=1e-5)
    model.env = VecNormalize(model.env)
    model.learn(96)


def test_hint_to_prefer_the_cpu():
    """SB3's hint to prefer the CPU is given for an MlpPolicy."""
    with pytest.warns(UserWarning, match="trying to run PPOExt on the GPU"):
        PPOExt("MlpPolicy", make_toys(), device="cuda")


def test_parameters_travel(tmp_path):
    """`set_parameters` takes a zip of the other device."""
    model = PPOExt("MlpPolicy", make_toys(), device="cuda", **SMALL).learn(32)
    model.save(tmp_path / "model")
    other = PPOExt("MlpPolicy", make_toys(), device="cpu", **SMALL)
    other.set_parameters(tmp_path / "model", device="cpu")
    on_cpu = {name: value.cpu() for name, value in model.policy.state_dict().items()}
    assert_equal(on_cpu, other.policy.state_dict(), "policy")


@pytest.mark.parametrize("action_dist", ["squashed_gaussian", "beta"])
def test_action_distributions_equal_the_cpu(action_dist):
    """
    Density, entropy, KL divergence, gradients and statistics equal those of the CPU, up to saturation and in both precisions.
    """
    network_outputs = th.cat([th.randn(500, 4), 10 * th.randn(500, 4), th.full((1, 4), 50.0), th.full((1, 4), -50.0)])
    for dtype, tolerance in ((th.float64, 1e-9), (th.float32, 1e-5)):
        results = []
        latents = None
        for device in ("cpu", "cuda"):
            outputs = network_outputs.to(device, dtype).requires_grad_()
            if action_dist == "beta":
                distribution = BoundedBetaDistribution(2).proba_distribution(outputs)
            else:
                distribution = TanhGaussianDistribution(2).proba_distribution(outputs[:, :2], outputs[0, 2:])
            latents = distribution.sample().detach().cpu() if latents is None else latents
            values = [distribution.log_prob(latents.to(device)), distribution.entropy()]
            values.append(kl_divergence(distribution.parameters().detach().roll(1, 0), distribution))
            gradients = [th.autograd.grad(value.sum(), outputs, retain_graph=True)[0] for value in values]
            results.append([part.detach().cpu() for part in [*values, *gradients]])
            statistics = distribution.statistics(distribution.parameters().detach())
            assert all(np.isfinite(value) for value in statistics.values())
        for on_cpu, on_cuda in zip(*results, strict=True):
            assert th.isfinite(on_cuda).all()
            th.testing.assert_close(on_cpu, on_cuda, rtol=tolerance, atol=10 * tolerance)


@pytest.mark.parametrize("action_dist", ["squashed_gaussian", "beta"])
def test_samples_on_cuda(action_dist):
    """Samples of both devices pass the Kolmogorov-Smirnov test, and log probabilities at the bounds are finite."""
    n = 20_000
    samples = []
    for device in ("cpu", "cuda"):
        th.manual_seed(0)
        if action_dist == "beta":
            distribution = BoundedBetaDistribution(1).proba_distribution(th.tensor([[1.0, -2.0]], device=device).expand(n, 2))
        else:
            mean = th.full((n, 1), 0.7, device=device)
            distribution = TanhGaussianDistribution(1).proba_distribution(mean, th.zeros(1, device=device))
        drawn = distribution.sample()
        assert th.isfinite(distribution.log_prob(drawn)).all()
        samples.append(np.sort(drawn.cpu().numpy().flatten()))
    both = np.concatenate(samples)
    one, other = (np.searchsorted(part, both, side="right") / n for part in samples)
    assert np.abs(one - other).max() < 1.63 * np.sqrt(2 / n)


@pytest.mark.parametrize(("policy", "spaces", "options"), POLICIES[:1] + POLICIES[2:])
@pytest.mark.parametrize("action_dist", ["squashed_gaussian", "beta"])
def test_first_ratio_of_bounded_distributions(action_dist, policy, spaces, options):
    """Before the first step the ratio is 1: the stored log probability is the one that is evaluated."""
    model = PPOExt(
        policy,
        make_toys(n_envs=3, **spaces),
        device="cuda",
        action_dist=action_dist,
        learning_rate=0.0,
        n_epochs=1,
        n_steps=32,
        batch_size=96,
        **options,
    )
    model.learn(100)
    assert abs(model.logger.name_to_value["train/ratio_max"] - 1) < 1e-4


def test_mean_tanh_moves_to_the_device():
    """The bounds of `mean_tanh` are buffers, which move with the policy."""
    policy_kwargs = dict(mean_tanh=True, learn_std=False)
    model = PPOExt("MlpPolicy", make_toys(), device="cuda", policy_kwargs=policy_kwargs, **SMALL).learn(64)
    assert devices(model) == {"cuda"}


@pytest.mark.parametrize("backend", ["device", "eager"])
def test_gsde_predicts_before_it_is_trained(backend):
    """The noise of gSDE lies on the GPU as soon as the policy does, so that it acts before its first rollout."""
    model = PPOExt("MlpPolicy", make_toys(), device="cuda", backend=backend, use_sde=True, **SMALL)
    actions, _ = model.predict(model.env.reset(), deterministic=False)
    assert np.isfinite(actions).all()


# Two GPUs

SEVERAL = pytest.mark.skipif(not th.cuda.is_available() or th.cuda.device_count() < 2, reason="needs two GPUs")


@SEVERAL
@pytest.mark.parametrize("options", [{}, dict(use_sde=True), dict(action_dist="beta", amp_dtype="bfloat16")], ids=str)
def test_second_gpu(options, tmp_path):
    """A policy trains on the GPU with number 1, whichever is the current one, and its zip goes on on the others."""
    model = PPOExt("MlpPolicy", make_toys(), device="cuda:1", **SMALL, **options).learn(64)
    assert {parameter.device for parameter in model.policy.parameters()} == {th.device("cuda", 1)}
    model.save(tmp_path / "model")
    for device in ("cuda:0", "cuda:1", "cpu"):
        loaded = PPOExt.load(tmp_path / "model", env=make_toys(), device=device).learn(32)
        assert {parameter.device for parameter in loaded.policy.parameters()} == {th.device(device)}


@SEVERAL
def test_current_gpu_changes():
    """Models on "cuda" train on the GPU that is the current one when they are made, after models on another one."""
    options = dict(action_dist="squashed_gaussian", bounds_coef=0.1, device="cuda", backend="device", **SMALL)
    for index in (1, 0):
        th.cuda.set_device(index)
        try:
            model = PPOExt("MlpPolicy", make_toys(), **options).learn(32)
        finally:
            th.cuda.set_device(0)
        assert model.policy.action_net.weight.device.index == index


@SEVERAL
def test_environments_on_another_gpu_are_refused():
    """Environments in tensors and policy are on one GPU; the error says what a rank of torchrun does before it makes them."""
    env = TorchVecEnv(TorchPendulum(4, device="cuda", max_episode_steps=12))
    with pytest.raises(ValueError, match=r"step on cuda:0; .*set_device"):
        PPOExt("MlpPolicy", env, device="cuda:1", backend="device", **SMALL)


@SEVERAL
def test_ranks_have_environments_on_gpus_of_their_own(monkeypatch):
    """Environments of the second rank that were made on the GPU of the first are refused, which NCCL would do much later."""
    env = TorchVecEnv(TorchPendulum(4, device="cuda", max_episode_steps=12))
    for name, value in {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "TORCHELASTIC_RUN_ID": "run"}.items():
        monkeypatch.setenv(name, value)
    try:
        with pytest.raises(ValueError, match=r"step on cuda:0, which is not the GPU of this rank.*set_device"):
            PPOExt("MlpPolicy", env, **SMALL)
        assert th.cuda.current_device() == 1
    finally:
        th.cuda.set_device(0)
