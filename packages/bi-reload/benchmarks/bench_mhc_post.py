"""Time ``mhc_post`` against vLLM's; ``mhc.py`` says how.

python packages/bi-reload/benchmarks/bench_mhc_post.py --out results/h200.jsonl
"""

from __future__ import annotations

from mhc import main

if __name__ == "__main__":
    main("mhc_post")
