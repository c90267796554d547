# The operator's and the router's images: one environment without Torch, two entry points.
#
#   docker build -f images/operator-router.Dockerfile --target operator -t kllm/operator .
#   docker build -f images/operator-router.Dockerfile --target router -t kllm/router .
#
# BASE has Python 3.11 or 3.12 as `python3`, with venv and pip.
ARG BASE=docker.io/library/python:3.11-slim-bookworm

FROM ${BASE} AS build
WORKDIR /src
RUN python3 -m venv /opt/kllm
COPY requirements/operator.txt requirements/router.txt requirements/
RUN /opt/kllm/bin/pip install --no-cache-dir --require-hashes -r requirements/operator.txt -r requirements/router.txt
COPY images/build-requirements.txt images/
RUN python3 -m venv /opt/build && /opt/build/bin/pip install --no-cache-dir --require-hashes -r images/build-requirements.txt
COPY pyproject.toml README.md LICENSE ./
COPY core core
COPY operator operator
COPY router router
COPY engine engine
COPY cli cli
RUN /opt/build/bin/python -m hatchling build --target wheel --directory /tmp/wheel \
    && /opt/kllm/bin/pip install --no-cache-dir --no-deps /tmp/wheel/*.whl \
    && /opt/kllm/bin/pip uninstall --yes pip setuptools

FROM ${BASE} AS runtime
COPY --from=build /opt/kllm /opt/kllm
ENV PATH=/opt/kllm/bin:/usr/local/bin:/usr/bin:/bin PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1
# Neither root nor anyone else on a node; by number, so that the kubelet can tell.
USER 65532:65532
WORKDIR /

FROM runtime AS operator
ENTRYPOINT ["kllm-operator"]

FROM runtime AS router
ENTRYPOINT ["kllm-router"]
