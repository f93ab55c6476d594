"""``python -m sb3_ppo_ext.zoo``: see :func:`sb3_ppo_ext.zoo.registration.main`."""

from sb3_ppo_ext.zoo.registration import main

if __name__ == "__main__":
    main()
