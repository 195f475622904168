"""Building weightonly: what to build (target), how (library, cutlass), and what came of it (report)."""
