"""The parts of `make touches`: each can be made where it says, and works."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.docs.touch_parts import Part
from tests.docs.touches import PARTS, make_part, prove


@pytest.mark.long
@pytest.mark.parametrize("part", PARTS, ids=lambda part: part.name)
def test_new_part_works(part: Part, tmp_path: Path) -> None:
    make_part(part, tmp_path)
    prove(part, tmp_path)
