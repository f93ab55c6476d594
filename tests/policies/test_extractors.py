"""The attention extractor: sequences in order, sets without, masks, and the algorithms that use it."""

import numpy as np
import pytest
import torch as th
from gymnasium import spaces
from stable_baselines3 import A2C, DQN, PPO, SAC
from stable_baselines3.common.vec_env import VecFrameStack
from support.toys import VECTOR, ToyEnv, make_toys

from sb3_ppo_ext import PPOExt, TransformerExtractor

SEQUENCE = spaces.Box(-1, 1, (4, 3), np.float32)
ENTITIES = spaces.Dict(
    {
        "entities": spaces.Box(-1, 1, (5, 3), np.float32),
        "there": spaces.MultiBinary(5),
        "own": VECTOR,
        "gear": spaces.Discrete(3),
    }
)
SMALL = dict(features_extractor_class=TransformerExtractor)


def batch(space, n=2):
    space.seed(0)
    samples = [space.sample() for _ in range(n)]
    if isinstance(space, spaces.Dict):
        return {key: th.tensor(np.stack([sample[key] for sample in samples])).float() for key in space.spaces}
    return th.tensor(np.stack(samples))


def test_order_of_a_sequence_counts():
    """The same frames in another order are another observation."""
    extractor = TransformerExtractor(SEQUENCE, n_layers=2)
    frames = batch(SEQUENCE)
    assert extractor(frames).shape == (2, 64)
    assert extractor.features_dim == 64
    assert (extractor(frames) - extractor(frames.flip(1))).abs().mean(dim=1).min() > 1e-2


def test_stacked_frames_are_a_sequence():
    """What `VecFrameStack` makes of vectors is read frame by frame."""
    env = VecFrameStack(make_toys(), 4)
    th.manual_seed(0)
    stacked = TransformerExtractor(env.observation_space, n_frames=4)
    th.manual_seed(0)
    sequence = TransformerExtractor(SEQUENCE)
    env.seed(3)
    env.reset()
    first, *_ = env.step(np.zeros((2, 2), np.float32))
    second, *_ = env.step(np.zeros((2, 2), np.float32))
    frames = th.tensor(second)
    np.testing.assert_array_equal(second[:, 6:9], first[:, 9:])
    th.testing.assert_close(stacked(frames), sequence(frames.reshape(2, 4, 3)))


def test_order_of_a_set_does_not_count():
    """Neither the order of a set nor masked entities change the features; the other entities do."""
    extractor = TransformerExtractor(ENTITIES, mask_key="there")
    entities = batch(ENTITIES) | {"gear": th.eye(3)[:2], "there": th.tensor([[1.0, 1, 0, 1, 0], [0.0, 0, 0, 0, 0]])}
    features = extractor(entities)
    order = th.tensor([3, 0, 4, 1, 2])
    permuted = entities | {key: entities[key][:, order] for key in ("entities", "there")}
    th.testing.assert_close(extractor(permuted), features)
    changed = entities["entities"].clone()
    changed[:, [2, 4]] = 9.0
    th.testing.assert_close(extractor(entities | {"entities": changed}), features)
    changed[0, 3] = 9.0
    after = extractor(entities | {"entities": changed})
    assert (after[0] - features[0]).abs().max() > 1e-3
    assert th.isfinite(features).all()
    for key in ("own", "gear"):
        assert (extractor(entities | {key: entities[key] + 1}) - features).abs().max() > 1e-3


def test_initialisation_is_its_own():
    """The orthogonal initialisation of SB3 leaves the layers of the transformer alone."""
    th.manual_seed(0)
    policy = PPOExt("MlpPolicy", ToyEnv(SEQUENCE), policy_kwargs=SMALL).policy
    weight = policy.features_extractor.encoder.layers[0].linear1.weight
    assert (weight.T @ weight - 2 * th.eye(64)).abs().max() > 0.1


@pytest.mark.many(one_in=3)
@pytest.mark.parametrize("algorithm", [PPO, PPOExt, A2C, SAC, DQN])
def test_algorithms(algorithm, tmp_path):
    """Each algorithm learns with the extractor, and its zip predicts the same."""
    space = spaces.Discrete(2) if algorithm is DQN else spaces.Box(-1, 1, (1,), np.float32)
    options = dict(learning_starts=4, batch_size=4) if algorithm in (SAC, DQN) else dict(n_steps=8)
    options |= dict(batch_size=8, n_epochs=1) if algorithm in (PPO, PPOExt) else {}
    kwargs = SMALL | dict(features_extractor_kwargs=dict(mask_key="there", d_model=16))
    model = algorithm("MultiInputPolicy", ToyEnv(ENTITIES, space), policy_kwargs=kwargs, device="cpu", seed=0, **options)
    before = [parameter.clone() for parameter in model.policy.parameters()]
    model.learn(16)
    assert any(not th.equal(*pair) for pair in zip(before, model.policy.parameters(), strict=True))
    model.save(tmp_path / "model")
    observation = ENTITIES.sample()
    actions = [m.predict(observation, deterministic=True)[0] for m in (model, algorithm.load(tmp_path / "model"))]
    np.testing.assert_array_equal(*actions)


@pytest.mark.parametrize(
    ("space", "kwargs", "message"),
    [
        (VECTOR, {}, "n_frames=None.*3 numbers"),
        (VECTOR, dict(n_frames=2), "n_frames=2"),
        (SEQUENCE, dict(d_model=10), "d_model=10.*n_heads=4"),
        (ENTITIES, dict(tokens_key="units"), "tokens_key='units'.*entities, gear, own, there"),
        (ENTITIES, dict(mask_key="mask"), "mask_key='mask'"),
        (spaces.Box(0, 255, (3, 4, 4), np.uint8), {}, r"observation_space=.*\(n_tokens, token_dim\)"),
    ],
)
def test_bad_arguments(space, kwargs, message):
    """Bad arguments are refused, named and with the remedy."""
    with pytest.raises(ValueError, match=message):
        TransformerExtractor(space, **kwargs)
