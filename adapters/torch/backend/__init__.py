"""The backend `sirtaki` of torch.distributed: `import sirtaki.torch.backend`, then
`torch.distributed.init_process_group("sirtaki")`.
"""

from __future__ import annotations

from sirtaki import autoload

autoload.register_torch_backend()

__all__: list[str] = []
