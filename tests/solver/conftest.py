"""The helper modules of this folder are importable by name, and hypothesis has a thorough profile."""

import os
import sys
from pathlib import Path

from hypothesis import HealthCheck, settings

sys.path.insert(0, str(Path(__file__).parent))

settings.register_profile("quick", max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
settings.register_profile("thorough", max_examples=2000, deadline=None, suppress_health_check=list(HealthCheck))
settings.load_profile("thorough" if os.environ.get("SHARDWISE_THOROUGH") else "quick")
