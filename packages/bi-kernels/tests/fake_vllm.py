"""A small vLLM and a small package that patches it, written to a directory: what the hook engine is tested against."""

from __future__ import annotations

import textwrap
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bi_kernels.runtime.anchors import InstalledSource, write_anchors
from bi_kernels.runtime.hooks import HookPlan, Patch

VLLM = {
    "vllm/__init__.py": "",
    "vllm/envs.py": """
        environment_variables = {
            "VLLM_KNOWN": lambda: "known",
        }


        def __getattr__(name):
            if name in environment_variables:
                return environment_variables[name]()
            raise AttributeError(name)
        """,
    "vllm/model_executor/__init__.py": "",
    "vllm/model_executor/custom_op.py": """
        op_registry_oot = {}


        class _Base:
            def __new__(cls, *args, **kwargs):
                return super().__new__(op_registry_oot.get(cls.__name__, cls))

            @classmethod
            def register_oot(cls, _decorated=None, name=None):
                def decorator(op_cls):
                    assert name not in op_registry_oot, f"Duplicate op name: {name}"
                    op_registry_oot[name] = op_cls
                    return op_cls

                return decorator


        class CustomOp(_Base):
            def __new__(cls, *args, **kwargs):
                return super().__new__(cls)

            @classmethod
            def register_oot(cls, _decorated=None, name=None):
                return super().register_oot(name=name)


        class PluggableLayer(_Base):
            def __new__(cls, *args, **kwargs):
                return super().__new__(cls)

            @classmethod
            def register_oot(cls, _decorated=None, name=None):
                return super().register_oot(name=name)
        """,
    "vllm/layers.py": """
        from vllm.model_executor.custom_op import CustomOp, PluggableLayer


        class Indexer(CustomOp):
            def select(self):
                return "stock"


        class Gate(PluggableLayer):
            def forward(self):
                return "stock"
        """,
    "vllm/provider.py": """
        def provided(x):
            return "stock"
        """,
    "vllm/ops.py": """
        from vllm.provider import provided

        WIDTH = 128


        def top_k(x):
            return "stock"


        class Model:
            def forward(self):
                return "stock"

            @staticmethod
            def fixed(x):
                return "stock"

            @classmethod
            def made(cls):
                return "stock"
        """,
    "vllm/models/__init__.py": "",
    "vllm/models/deepseek_v4/__init__.py": "",
    "vllm/models/deepseek_v4/model.py": """
        def mhc(x):
            return "stock"


        AT_IMPORT = mhc(0)
        """,
}

PACKAGE = {
    "bi_fake/__init__.py": "",
    "bi_fake/_version.py": "__version__ = '0.1.0'",
    "bi_fake/impl.py": """
        def ours(*args):
            return "ours"


        def factory(original):
            def wrapped(*args):
                return f"ours around {original(*args)}"

            return wrapped


        def subclass(original):
            return type("Ours", (original,), {"select": ours, "forward": ours})


        def broken(original):
            raise RuntimeError("the factory broke")


        def not_a_subclass(original):
            return dict
        """,
}


@dataclass
class FakeWorld:
    """The directory on the import path that holds the fake vLLM and the fake package ``bi_fake``."""

    root: Path

    def write(self, files: dict[str, str]) -> None:
        for name, text in files.items():
            path = self.root / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(textwrap.dedent(text))

    def install_vllm(self, version: str = "0.26.0+cu130") -> None:
        self.write(VLLM)
        self.write({f"vllm-{version}.dist-info/METADATA": f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}\n"})

    def plan(self, *patches: Patch, anchored: bool = True, package: str = "bi-fake", **kwargs: Any) -> HookPlan:
        plan = HookPlan(package=package, import_name="bi_fake", patches=patches, **kwargs)
        if anchored:
            write_anchors(plan, InstalledSource())
        return plan


def patch(target: str, replacement: str = "ours", **kwargs: Any) -> Patch:
    """A patch whose prose does not matter."""
    return Patch(
        target=target,
        replacement=f"bi_fake.impl:{replacement}",
        why="a test",
        upstream="none",
        remove_when="never",
        **kwargs,
    )
