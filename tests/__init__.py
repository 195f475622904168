"""Tests, in folders by subject; what several folders use is here."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
