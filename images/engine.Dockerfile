# The engine's image: SGLang's own for NVIDIA GPUs, with kLLM's agent beside it.
#
#   docker build -f images/engine.Dockerfile -t kllm/engine .
#
# BASE is the SGLang release that pyproject.toml names; what it brings (Torch, SGLang, Mooncake) stays as it is.
ARG BASE=docker.io/lmsysorg/sglang:v0.5.21

FROM ${BASE}
WORKDIR /src
COPY images/build-requirements.txt images/engine-requirements.txt images/
# Only what the base lacks is installed, so that no dependency of SGLang's changes its version.
RUN python3 -m pip install --no-cache-dir --no-deps --require-hashes -r images/engine-requirements.txt \
    && python3 -m venv /opt/build \
    && /opt/build/bin/pip install --no-cache-dir --require-hashes -r images/build-requirements.txt
COPY pyproject.toml README.md LICENSE ./
COPY core core
COPY operator operator
COPY router router
COPY engine engine
COPY cli cli
RUN /opt/build/bin/python -m hatchling build --target wheel --directory /tmp/wheel \
    && python3 -m pip install --no-cache-dir --no-deps /tmp/wheel/*.whl \
    && python3 -c "import kllm_engine.main, sglang" \
    && rm -rf /opt/build /src /tmp/wheel
ENV PYTHONUNBUFFERED=1
USER 65532:65532
WORKDIR /
ENTRYPOINT ["kllm-engine"]
