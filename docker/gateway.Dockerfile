# syntax=docker/dockerfile:1
# The gateway: text in, text out; no torch. Build from the repository's root:
#   docker build -f docker/gateway.Dockerfile -t katydid-gateway:0.1.0 .
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
    && /opt/katydid/bin/pip install --no-cache-dir -c constraints.txt "$(ls /wheels/katydid-*.whl)[gateway]"

FROM ${PYTHON_IMAGE}
COPY --from=build /opt/katydid /opt/katydid
# Of the small model the gateway needs the text side alone.
COPY models/hy3-tiny/*.json /opt/katydid/models/hy3-tiny/
RUN useradd --uid 10001 --user-group --no-create-home --home-dir /tmp katydid \
    && install -d -m 0770 -o katydid -g katydid /run/katydid
ENV PATH=/opt/katydid/bin:$PATH PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1 HOME=/tmp
USER 10001:10001
EXPOSE 8000 8001 8002
ENTRYPOINT ["python", "-m", "katydid_gateway"]
