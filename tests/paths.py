"""Where the tests find the checkout's other folders."""

from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
KERNELS_CU = ROOT / "kernels_cu"
GOLDEN = ROOT / "tests" / "golden"
