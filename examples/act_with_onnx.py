"""Plays an episode with an exported policy, without PyTorch: python examples/act_with_onnx.py policy.onnx Pendulum-v1"""

import sys

import gymnasium as gym
import numpy as np
import onnxruntime

path, env_id = sys.argv[1:]
session = onnxruntime.InferenceSession(path)
# A policy with a memory has further inputs: its state, zeros at first, and whether an episode begins.
inputs = {
    each.name: np.zeros([1 if isinstance(size, str) else size for size in each.shape], np.float32)
    for each in session.get_inputs()
}
outputs = [each.name for each in session.get_outputs()]
env = gym.make(env_id)
observation, _ = env.reset(seed=0)
total, done, start = 0.0, False, 1.0
while not done:
    inputs["observation"] = observation[np.newaxis]
    if "episode_start" in inputs:
        inputs["episode_start"] = np.float32([start])
    results = dict(zip(outputs, session.run(None, inputs), strict=True))
    observation, reward, terminated, truncated, _ = env.step(results.pop("action")[0])
    inputs.update({name.removeprefix("next_"): value for name, value in results.items()})
    total, done, start = total + float(reward), terminated or truncated, 0.0
print(f"return: {total:.1f}")
