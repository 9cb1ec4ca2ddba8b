"""The name under which this copy of the library registers its operators with torch, its targets with XLA.

Another copy in the same process, such as a kernel of the Hugging Face hub, has another name.
"""

from __future__ import annotations

__all__ = ["NAMESPACE", "PACKAGE"]

PACKAGE = __name__.rpartition(".")[0]
NAMESPACE = PACKAGE.replace(".", "_")
