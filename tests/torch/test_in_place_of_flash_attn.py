"""The lines of docs/use_it_in.md that put this library in the place of flash_attn."""

import os
import re
import subprocess
import sys

import pytest

pytest.importorskip("torch", reason="torch is not installed: pip install 'cupy-flash[torch]'")

from tests.paths import ROOT

pytestmark = pytest.mark.torch

USED = """
import torch
from flash_attn import flash_attn_func
from flash_attn.bert_padding import pad_input, unpad_input
from flash_attn.flash_attn_interface import flash_attn_varlen_func
ours = pad_input, unpad_input, flash_attn_func, flash_attn_varlen_func
assert all(x.__module__.startswith("cupy_flash.") for x in ours)
q = torch.randn(1, 8, 2, 16)
print(flash_attn_func(q, q, q, causal=True).shape == q.shape)
"""


def test_imports_of_flash_attn_find_this_library():
    page = (ROOT / "docs" / "use_it_in.md").read_text(encoding="utf-8")
    blocks = re.findall(r"^```py\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    (lines,) = [block for block in blocks if "cupy_flash.flash_attn" in block]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", lines + USED]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.stdout.split() == ["True"], done.stderr
