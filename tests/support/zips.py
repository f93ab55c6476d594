"""Models that are saved to zips in memory, and zips made by hand."""

import io
import zipfile

from sb3_ppo_ext import PPOExt


def parts(content):
    """Members of a zip by name."""
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def packed(members, method=zipfile.ZIP_STORED):
    """A zip with these members."""
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", method) as archive:
        for name, content in members.items():
            archive.writestr(name, content)
    return file.getvalue()


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
