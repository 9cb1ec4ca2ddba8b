"""The name under which this copy of the library registers torch operators and XLA targets.

Another copy in the same process, such as a kernel from the Hugging Face hub, has another name.
"""

from __future__ import annotations

__all__ = ["NAMESPACE", "PACKAGE"]

PACKAGE = __name__.rpartition(".")[0]
NAMESPACE = PACKAGE.replace(".", "_")
