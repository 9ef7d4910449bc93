# syntax=docker/dockerfile:1
# An engine, in two forms. Build from the repository's root:
#   docker build -f docker/engine.Dockerfile --target cuda -t katydid-engine:0.1.0 .
#   docker build -f docker/engine.Dockerfile --target cpu  -t katydid-engine:0.1.0-cpu .
ARG PYTHON_IMAGE=python:3.12.12-slim-bookworm

FROM ${PYTHON_IMAGE} AS wheel
WORKDIR /src
COPY pyproject.toml README.md constraints.txt ./
COPY protos/katydid protos/katydid
COPY services services
COPY kernels kernels
COPY sdk sdk
COPY cli cli
RUN pip wheel --no-cache-dir --no-deps --wheel-dir /wheels . && python -m venv /opt/katydid

# PyTorch brings the CUDA libraries with it; the driver comes from the host.
FROM wheel AS build-cuda
RUN /opt/katydid/bin/pip install --no-cache-dir torch==2.11.0
RUN /opt/katydid/bin/pip install --no-cache-dir -c constraints.txt "$(ls /wheels/katydid-*.whl)[engine]"

FROM wheel AS build-cpu
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
RUN /opt/katydid/bin/pip install --no-cache-dir --index-url "${TORCH_INDEX}" torch==2.13.0
RUN /opt/katydid/bin/pip install --no-cache-dir -c constraints.txt "$(ls /wheels/katydid-*.whl)[engine]"

FROM ${PYTHON_IMAGE} AS base
COPY models/hy3-tiny /opt/katydid/models/hy3-tiny
# Files of the model may be readable by their maker alone.
RUN chmod -R a+rX /opt/katydid/models \
    && useradd --uid 10001 --user-group --no-create-home --home-dir /tmp katydid \
    && install -d -m 0770 -o katydid -g katydid /run/katydid
ENV PATH=/opt/katydid/bin:$PATH PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1 HOME=/tmp TRITON_CACHE_DIR=/tmp/triton
EXPOSE 8100 8101
ENTRYPOINT ["python", "-m", "katydid_engine"]

FROM base AS cpu
COPY --from=build-cpu /opt/katydid /opt/katydid
USER 10001:10001

FROM base AS cuda
# Triton builds the launchers of its kernels with a C compiler when they are first used.
# The base image decides the release, and with its digest given the archive's state is as good as pinned.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends gcc libc6-dev \
    && rm -rf /var/lib/apt/lists/*
COPY --from=build-cuda /opt/katydid /opt/katydid
ENV NVIDIA_VISIBLE_DEVICES=all NVIDIA_DRIVER_CAPABILITIES=compute,utility
USER 10001:10001
