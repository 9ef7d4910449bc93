# syntax=docker/dockerfile:1
# The KV-cache service: pages in, pages out; no torch. Build from the repository's root:
#   docker build -f docker/kvcache.Dockerfile -t katydid-kvcache:0.1.0 .
ARG PYTHON_IMAGE=python:3.12.12-slim-bookworm

FROM ${PYTHON_IMAGE} AS build
WORKDIR /src
COPY pyproject.toml README.md constraints.txt ./
COPY protos/katydid protos/katydid
COPY services services
COPY kernels kernels
COPY sdk sdk
COPY cli cli
RUN pip wheel --no-cache-dir --no-deps --wheel-dir /wheels . \
    && python -m venv /opt/katydid \
    && /opt/katydid/bin/pip install --no-cache-dir -c constraints.txt "$(ls /wheels/katydid-*.whl)[kvcache,cli]"

FROM ${PYTHON_IMAGE}
COPY --from=build /opt/katydid /opt/katydid
RUN useradd --uid 10001 --user-group --no-create-home --home-dir /tmp katydid \
    && install -d -m 0770 -o katydid -g katydid /run/katydid /var/lib/katydid
ENV PATH=/opt/katydid/bin:$PATH PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1 HOME=/tmp
USER 10001:10001
EXPOSE 8200 8201 8203
ENTRYPOINT ["python", "-m", "katydid_kvcache"]
