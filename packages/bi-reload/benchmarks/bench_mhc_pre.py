"""Time ``mhc_pre``, its form for layer 0, and explicit post and pre together against vLLM's; ``mhc.py`` says how.

python packages/bi-reload/benchmarks/bench_mhc_pre.py --out results/h200.jsonl
"""

from __future__ import annotations

from mhc import main

if __name__ == "__main__":
    main("mhc_post_pre", "mhc_pre", "mhc_pre_broadcast")
