"""What an older torch than the one that is pinned does not do."""

import pytest
import torch

# Found with 2.11, the oldest that is accepted.
LOSES_ERRORS = pytest.mark.xfail(
    torch.__version__ < (2, 13),
    reason="torch.compile of this torch raises an error of its own without ours",
)
