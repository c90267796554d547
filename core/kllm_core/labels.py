"""Names on Kubernetes objects. Pure."""

GROUP = "kllm.io"
VERSION = "v1alpha1"
API_VERSION = f"{GROUP}/{VERSION}"

NAME = "app.kubernetes.io/name"
INSTANCE = "app.kubernetes.io/instance"
COMPONENT = "app.kubernetes.io/component"
PART_OF = "app.kubernetes.io/part-of"
MANAGED_BY = "app.kubernetes.io/managed-by"

SERVICE = f"{GROUP}/service"
ROLE = f"{GROUP}/role"
REVISION = f"{GROUP}/revision"
SPEC_HASH = f"{GROUP}/spec-hash"
PAUSED = f"{GROUP}/paused"
