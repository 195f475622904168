"""Imported by tests of the integrations before they import those libraries: skips them where one is missing or old."""

from __future__ import annotations

import pytest

pytest.importorskip("transformers", minversion="5.23")
pytest.importorskip("accelerate", minversion="1.10")
