"""Ops on torch tensors: a quantized linear layer as a torch module, beside the definition and the dense product.

pip install 'penstock[cuda]'                          # brings torch; a GPU is used if there is one
python examples/ops_torch.py
"""

import torch

import penstock
from penstock import ops


class QuantizedLinear(torch.nn.Module):
    """x [..., K] times the transpose of a weight [N, K] that is held in 4 bits."""

    def __init__(self, dense: torch.nn.Linear, bits: int = 4, group_size: int = 64) -> None:
        super().__init__()
        weight = dense.weight.detach().cpu().numpy()
        device = "torch" if dense.weight.device.type == "cpu" else str(dense.weight.device)
        self.weight = penstock.quantize(weight, bits=bits, group_size=group_size).to(device)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return ops.quantized_matmul(x.contiguous(), self.weight)


def main() -> None:
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dense = torch.nn.Linear(1024, 512, bias=False, device=device)
    layer = QuantizedLinear(dense)
    x = torch.randn(3, 1024, device=device)

    h = ops.rms_norm(x, torch.ones(1024, device=device), eps=1e-6)  # tensors in, tensors out, on the same device
    y = layer(h)
    print(f"{dense.weight.nbytes} bytes of weights became {layer.weight.nbytes}")
    print(f"off the dense product by {(y - dense(h)).norm() / dense(h).norm():.3f} of its length")

    with penstock.backend("reference"):  # the definition, in NumPy
        exact = layer(h.cpu()) if device == "cpu" else None
    if exact is not None:
        print(f"off the definition by {(y - exact).abs().max():.1e}")

    ids, weights = ops.moe_route(y, None, top_k=8)  # eight experts of 512 for each row
    print(ids.shape, weights.sum(dim=-1))


if __name__ == "__main__":
    main()
