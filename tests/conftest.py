"""Makes the helper modules beside this file importable: in pytest's importlib mode, tests/ is not on the path."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
