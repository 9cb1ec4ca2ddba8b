"""Nothing here runs without torch."""

import pytest

pytest.importorskip("torch", reason="torch is not installed: pip install 'cupy-flash[torch]'")
