"""
The tasks on which the entry `default` is chosen, and those that choose nothing. Not a script.

The tasks of ``DEVELOPMENT`` are run by `search_default.py`. Their budgets are short, so that many runs are affordable.
"""

# Tasks that the project knows, with both kinds of actions
DEVELOPMENT = {
    "CartPole-v1": 20_000,
    "Acrobot-v1": 50_000,
    "MountainCar-v0": 100_000,
    "LunarLander-v3": 100_000,
    "MinAtar/Breakout-v1": 100_000,
    "MinAtar/SpaceInvaders-v1": 60_000,
    "Pendulum-v1": 100_000,
    "MountainCarContinuous-v0": 30_000,
    "LunarLanderContinuous-v3": 100_000,
    "BipedalWalker-v3": 100_000,
    "InvertedDoublePendulum-v5": 50_000,
    "Reacher-v5": 100_000,
    "Hopper-v5": 100_000,
    "HalfCheetah-v5": 100_000,
    "Walker2d-v5": 100_000,
}
DISCRETE = set(list(DEVELOPMENT)[:6])
# Tasks that choose nothing. They are run once, when the default has been fixed. Most are in packages not used before:
# EnvPool (``EnvPool/``: grids, driving, games, robots of the DeepMind Control Suite and of Meta-World), POPGym,
# flappy-bird-gymnasium, pybullet-envs-gymnasium, panda-gym and PyFlyt.
HELD_OUT = {
    # Discrete actions
    "EnvPool/MiniGrid-DoorKey-5x5-v0": 100_000,
    "EnvPool/Merge-v0": 50_000,
    "EnvPool/Highway-v0": 50_000,
    "EnvPool/Play2048-v1": 200_000,
    "EnvPool/Jumanji.Snake-v1": 200_000,
    "EnvPool/Taxi-v3": 100_000,
    "EnvPool/Boxing-v5": 50_000,
    "FlappyBird-v0": 100_000,
    "popgym-HigherLowerEasy-v0": 50_000,
    "popgym-CountRecallEasy-v0": 100_000,
    "popgym-MineSweeperEasy-v0": 100_000,
    # Continuous actions
    "EnvPool/CartpoleSwingup-v1": 100_000,
    "EnvPool/CheetahRun-v1": 300_000,
    "EnvPool/FingerSpin-v1": 200_000,
    "EnvPool/WalkerWalk-v1": 300_000,
    "EnvPool/MetaWorld.Reach-v3": 100_000,
    "EnvPool/MetaWorld.DrawerClose-v3": 100_000,
    "EnvPool/Parking-v0": 100_000,
    "EnvPool/Racetrack-v0": 100_000,
    "EnvPool/CarRacing-v3": 30_000,
    "HopperBulletEnv-v0": 200_000,
    "ReacherBulletEnv-v0": 100_000,
    "InvertedPendulumSwingupBulletEnv-v0": 100_000,
    "PandaReachDense-v3": 50_000,
    "PyFlyt/QuadX-Hover-v1": 100_000,
    "AdroitHandDoor-v1": 100_000,
}
HELD_OUT_DISCRETE = set(list(HELD_OUT)[:11])
# Packages that register them, by the beginning of their names; `envpool_ids` is beside this script.
HELD_OUT_PACKAGES = {
    "EnvPool/": "envpool_ids",
    "popgym-": "popgym",
    "FlappyBird": "flappy_bird_gymnasium",
    "HopperBulletEnv": "pybullet_envs_gymnasium",
    "ReacherBulletEnv": "pybullet_envs_gymnasium",
    "InvertedPendulumSwingupBulletEnv": "pybullet_envs_gymnasium",
    "Panda": "panda_gym",
    "PyFlyt/": "PyFlyt.gym_envs",
    "AdroitHand": "gymnasium_robotics",
}
# Observations of other kinds than vectors of numbers
HELD_OUT_POLICIES = {
    **dict.fromkeys(("EnvPool/Boxing-v5", "EnvPool/CarRacing-v3"), "CnnPolicy"),
    **dict.fromkeys(("EnvPool/MiniGrid-DoorKey-5x5-v0", "EnvPool/Jumanji.Snake-v1"), "MultiInputPolicy"),
    **dict.fromkeys(("EnvPool/CartpoleSwingup-v1", "EnvPool/CheetahRun-v1", "EnvPool/FingerSpin-v1"), "MultiInputPolicy"),
    **dict.fromkeys(("EnvPool/WalkerWalk-v1", "EnvPool/Parking-v0", "PandaReachDense-v3"), "MultiInputPolicy"),
}
# Images, numbers of a few kinds, and observations between 0 and 1 already, of which `default` normalises none
NOT_NORMALIZED = {
    *("EnvPool/Boxing-v5", "EnvPool/CarRacing-v3", "EnvPool/Taxi-v3", "FlappyBird-v0"),
    *("popgym-HigherLowerEasy-v0", "popgym-CountRecallEasy-v0", "popgym-MineSweeperEasy-v0"),
}


def is_discrete(task: str) -> bool:
    """:return: Whether a task of any suite has discrete actions"""
    return task in DISCRETE | HELD_OUT_DISCRETE or task.startswith("MinAtar/")
