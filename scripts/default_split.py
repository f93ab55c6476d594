"""
The tasks on which the entry `default` is chosen, and those that choose nothing. Not a script.

The tasks of ``DEVELOPMENT`` are run by `search_default.py`. Their budgets are short, so that many runs are affordable.
``MORE_DEVELOPMENT`` was held out from the search, and showed that its choice was too narrow. Since then, candidates are
compared on both, and ``HELD_OUT`` has tasks that were added before the next choice.
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
# Tasks that the search did not see. Most are in packages not used before: EnvPool (``EnvPool/``: grids, driving, games, robots
# of the DeepMind Control Suite and of Meta-World), POPGym, flappy-bird-gymnasium, pybullet-envs-gymnasium, panda-gym, PyFlyt.
MORE_DEVELOPMENT = {
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
MORE_DISCRETE = set(list(MORE_DEVELOPMENT)[:11])
# Tasks that choose nothing: other ones of the same packages, of the BabyAI, MyoSuite and Fetch robots in EnvPool as well
HELD_OUT = {
    # Discrete actions
    "EnvPool/MiniGrid-LavaGapS5-v0": 100_000,
    "EnvPool/MiniGrid-Fetch-5x5-N2-v0": 100_000,
    "EnvPool/MiniGrid-Dynamic-Obstacles-5x5-v0": 50_000,
    "EnvPool/BabyAI-GoToRedBallGrey-v0": 100_000,
    "EnvPool/Roundabout-v0": 50_000,
    "EnvPool/Intersection-v0": 50_000,
    "EnvPool/TwoWay-v0": 50_000,
    "EnvPool/Catch-v0": 50_000,
    "EnvPool/FrozenLake8x8-v1": 100_000,
    "popgym-MultiarmedBanditEasy-v0": 50_000,
    "popgym-NoisyPositionOnlyCartPoleEasy-v0": 100_000,
    # Continuous actions
    "EnvPool/PendulumSwingup-v1": 100_000,
    "EnvPool/ReacherEasy-v1": 100_000,
    "EnvPool/HopperStand-v1": 100_000,
    "EnvPool/BallInCupCatch-v1": 100_000,
    "EnvPool/PointMassEasy-v1": 100_000,
    "EnvPool/FishUpright-v1": 100_000,
    "EnvPool/SwimmerSwimmer6-v1": 100_000,
    "EnvPool/FingerTurnEasy-v1": 100_000,
    "EnvPool/WalkerStand-v1": 100_000,
    "EnvPool/MetaWorld.WindowOpen-v3": 100_000,
    "EnvPool/MetaWorld.PlateSlide-v3": 100_000,
    "EnvPool/RacetrackOval-v0": 50_000,
    "EnvPool/ParkingActionRepeat-v0": 50_000,
    "EnvPool/MyoSuite.myoFingerReachFixed-v0": 100_000,
    "EnvPool/MyoSuite.myoElbowPose1D6MRandom-v0": 100_000,
    "EnvPool/FetchReachDense-v4": 50_000,
    "EnvPool/PointMaze_OpenDense-v3": 100_000,
    "HalfCheetahBulletEnv-v0": 100_000,
    "Walker2DBulletEnv-v0": 100_000,
}
HELD_OUT_DISCRETE = set(list(HELD_OUT)[:11])
# Packages that register them, by the beginning of their names; `envpool_ids` is beside this script.
MORE_PACKAGES = {
    "EnvPool/": "envpool_ids",
    "popgym-": "popgym",
    "FlappyBird": "flappy_bird_gymnasium",
    **dict.fromkeys(("HopperBulletEnv", "ReacherBulletEnv", "InvertedPendulumSwingupBulletEnv"), "pybullet_envs_gymnasium"),
    **dict.fromkeys(("HalfCheetahBulletEnv", "Walker2DBulletEnv"), "pybullet_envs_gymnasium"),
    "Panda": "panda_gym",
    "PyFlyt/": "PyFlyt.gym_envs",
    "AdroitHand": "gymnasium_robotics",
}
# Observations of other kinds than vectors of numbers
_DICT = (
    *("MiniGrid-DoorKey-5x5-v0", "Jumanji.Snake-v1", "CartpoleSwingup-v1", "CheetahRun-v1", "FingerSpin-v1", "WalkerWalk-v1"),
    *("Parking-v0", "MiniGrid-LavaGapS5-v0", "MiniGrid-Fetch-5x5-N2-v0", "MiniGrid-Dynamic-Obstacles-5x5-v0"),
    *("BabyAI-GoToRedBallGrey-v0", "PendulumSwingup-v1", "ReacherEasy-v1", "HopperStand-v1"),
    *("BallInCupCatch-v1", "PointMassEasy-v1", "FishUpright-v1", "SwimmerSwimmer6-v1", "FingerTurnEasy-v1", "WalkerStand-v1"),
    *("ParkingActionRepeat-v0", "FetchReachDense-v4", "PointMaze_OpenDense-v3"),
)
MORE_POLICIES = {
    **dict.fromkeys(("EnvPool/Boxing-v5", "EnvPool/CarRacing-v3"), "CnnPolicy"),
    **dict.fromkeys((f"EnvPool/{name}" for name in _DICT), "MultiInputPolicy"),
    "PandaReachDense-v3": "MultiInputPolicy",
}
# Images, numbers of a few kinds, and observations between 0 and 1 already, of which `default` normalises none
NOT_NORMALIZED = {
    *("EnvPool/Boxing-v5", "EnvPool/CarRacing-v3", "EnvPool/Taxi-v3", "FlappyBird-v0"),
    *("popgym-HigherLowerEasy-v0", "popgym-CountRecallEasy-v0", "popgym-MineSweeperEasy-v0"),
    *("EnvPool/TwoWay-v0", "EnvPool/Catch-v0", "EnvPool/FrozenLake8x8-v1", "popgym-MultiarmedBanditEasy-v0"),
}


def is_discrete(task: str) -> bool:
    """:return: Whether a task of any suite has discrete actions"""
    return task in DISCRETE | MORE_DISCRETE | HELD_OUT_DISCRETE or task.startswith("MinAtar/")
