"""Small trainings of PPOExt, and what they change."""

from support.toys import make_toys

from sb3_ppo_ext import PPOExt
from sb3_ppo_ext.update.optimizers import critic_parameters

# No gradient is clipped, so that actor and critic do not influence each other.
SMALL = dict(n_steps=16, batch_size=8, n_epochs=3, seed=3, device="cpu", max_grad_norm=1e9)


def make(algorithm=PPOExt, env_kwargs=None, policy="MlpPolicy", **options):
    return algorithm(policy, make_toys(**(env_kwargs or {})), **{**SMALL, **options})


def run(*args, timesteps=32, **kwargs):
    return make(*args, **kwargs).learn(timesteps)


def changed(one, other, tolerance=0.0):
    """Which of actor and critic differ by more than this fraction of the largest value of a parameter."""
    of_critic = {name for name, p in one.policy.named_parameters() if p in critic_parameters(one.policy)}
    a, b = one.policy.state_dict(), other.policy.state_dict()
    differ = {name for name in a if not (a[name] - b[name]).abs().max() <= tolerance * a[name].abs().max()}
    return " and ".join(sorted({"critic" if name in of_critic else "actor" for name in differ}))


def before_steps(model, look):
    """Call a function right before each step of the optimiser, when the gradients are final."""
    step = model.policy.optimizer.step

    def looked_at():
        look()
        step()

    model.policy.optimizer.step = looked_at


def logged(model):
    return dict(model.logger.name_to_value)


BOTH = "actor and critic"


class Recording(PPOExt):
    """Keeps every minibatch, and the parameters before its optimizer step."""

    def __init__(self, *args, **kwargs):
        self.seen = []
        super().__init__(*args, **kwargs)

    def extra_actor_loss(self, rollout_data, distribution):
        self.seen.append((rollout_data, {name: p.clone() for name, p in self.policy.state_dict().items()}))
        return super().extra_actor_loss(rollout_data, distribution)
