"""Models that are saved to zips in memory."""

import io

from sb3_ppo_ext import PPOExt


class Zip:
    """A saved model that can be loaded any number of times."""

    def __init__(self, model):
        file = io.BytesIO()
        model.save(file)
        self.content = file.getvalue()

    def open(self):
        return io.BytesIO(self.content)

    def load(self, algorithm=PPOExt, **kwargs):
        return algorithm.load(self.open(), **kwargs)
