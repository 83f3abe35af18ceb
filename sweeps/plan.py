"""x"""

from sweeps.expand import expand
from sweeps.spec import load_sweep


def plan_command(args):
    print(len(expand(load_sweep(args.sweep, tiny=args.tiny, overrides=args.overrides))))
    return 0
