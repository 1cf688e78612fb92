# What people type. Each target works on a fresh Debian 12 with a Rust toolchain and root; `deps` installs the rest.
SHELL := /bin/bash
.DEFAULT_GOAL := help
GUEST_TARGET := x86_64-unknown-linux-musl
BIN := target/release/pando
DATA ?= .cache/data
export PANDO_DATA_DIR ?= $(abspath $(DATA))

.PHONY: help
help: ## this list
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "make %-8s %s\n", $$1, $$2}'

.PHONY: deps
deps: ## install what is missing (Debian packages, the guest's Rust target)
	@scripts/install-deps

.PHONY: build
build: deps ## build the program, the VMM and the guest agent
	cargo build --locked --release --package guest --target $(GUEST_TARGET)
	cargo build --locked --release --package pando --package vmm

.PHONY: setup
setup: build ## make the guest's kernel, disk and base template
	@mkdir -p $(PANDO_DATA_DIR)
	$(BIN) setup

.PHONY: up
up: setup ## serve the E2B API on 127.0.0.1:3000, in the foreground
	$(BIN) serve

.PHONY: demo
demo: setup ## start a server, run agent code through the official SDK, show the result and the times
	@scripts/demo

.PHONY: test
test: setup ## all tests: unit, and the real server with the official SDKs and real guests
	@scripts/test

.PHONY: lab
lab: setup ## tests that need KVM, in a software machine that has it wherever this runs
	@lab/check

.PHONY: check
check: deps ## what reviewers ask for: format, clippy, rules of the house, licences
	cargo fmt --all --check
	cargo clippy --locked --workspace --all-targets -- --deny warnings
	cargo xtask lint
	@scripts/deny

.PHONY: bench
bench: setup ## measure, beside peers on the same machine
	@scripts/bench
