"""A case with a mask of its own kind, beside the options of a `Case`."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import numpy as np

from tests.cases import Case
from tests.public import with_mask


@dataclass(frozen=True)
class MaskedCase(ABC):
    """A case, and a mask that is no array."""

    case: Case

    def __getattr__(self, name: str) -> object:
        """A field of the case: functional tests take either."""
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.case, name)

    @abstractmethod
    def inputs(self) -> dict[str, np.ndarray]:
        """Those of the case, and the arrays of the mask."""

    @abstractmethod
    def mask_of(self, arrays: dict[str, np.ndarray]) -> object:
        """The mask, of its kind, from the inputs."""

    @abstractmethod
    def as_mask(self, arrays: dict[str, np.ndarray]) -> np.ndarray:
        """The pairs that it keeps."""

    def options(self, arrays: dict[str, np.ndarray]) -> dict[str, object]:
        """Those of the case, and the mask."""
        return with_mask(self.case.options(arrays), self.mask_of(arrays))

    def with_mask(self, arrays: dict[str, np.ndarray]) -> dict[str, object]:
        """The same as an array."""
        mask = self.as_mask(arrays)
        if "mask" in arrays:
            mask = mask & arrays["mask"]
        return self.case.options(arrays) | {"mask": mask}
