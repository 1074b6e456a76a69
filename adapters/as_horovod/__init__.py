"""sirtaki under Horovod's name: after this import, `import horovod.torch` means `sirtaki.torch`.

It has to come before the first import of horovod, and raises ImportError after that of a real Horovod.
`hvdrun --as-horovod` does the same for programs that stay as they are. With the environment variable
SIRTAKI_AS_HOROVOD=0 the import has no effect, and an installed Horovod is used.
"""

from __future__ import annotations

from sirtaki.as_horovod.activation import activate, is_declined

if not is_declined():
    activate()
