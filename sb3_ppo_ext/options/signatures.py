"""How `help` prints a constructor with many arguments."""

import inspect
from collections.abc import Callable
from typing import Any, TypeVar

Constructor = TypeVar("Constructor", bound=Callable[..., None])


class _PrintedWithTheClass(inspect.Signature):
    """The signature of a constructor: all of its arguments, which are only printed where ``self`` is bound."""

    def __str__(self) -> str:
        return "(self, ...)" if "self" in self.parameters else super().__str__()

    # What Python 3.13 and later print
    def format(self, **kwargs: Any) -> str:
        return "(self, ...)" if "self" in self.parameters else super().format(**kwargs)  # type: ignore[misc]


def printed_with_the_class(constructor: Constructor) -> Constructor:
    """
    Make `help` of a class print its arguments once, with the name of the class. Whoever asks for them gets all, as before.

    :param constructor: The method ``__init__``
    :return: The same method
    """
    signature = inspect.signature(constructor)
    printed = _PrintedWithTheClass(list(signature.parameters.values()), return_annotation=signature.return_annotation)
    constructor.__signature__ = printed  # type: ignore[attr-defined]
    return constructor
