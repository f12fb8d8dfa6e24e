"""Write plainly, run fused: trace a step of a model, rewrite it, give it buffers, replay it."""

from penstock.graph.fuse import fuse
from penstock.graph.plan import Plan, plan
from penstock.graph.program import Bound, Program, Wrap
from penstock.graph.sizes import SizedProgram
from penstock.graph.trace import Graph, Node, Value, trace

__all__ = ["Bound", "Graph", "Node", "Plan", "Program", "SizedProgram", "Value", "Wrap", "fuse", "plan", "trace"]
