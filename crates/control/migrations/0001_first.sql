-- Only what SQLite and PostgreSQL share: TEXT identifiers, BIGINT times in microseconds since 1970, JSON as TEXT.
CREATE TABLE teams (
    id TEXT PRIMARY KEY,
    name TEXT NOT NULL,
    created_at BIGINT NOT NULL
);
CREATE TABLE api_keys (
    hash TEXT PRIMARY KEY, -- SHA-256 of the key, hex; the key itself is not kept
    team TEXT NOT NULL REFERENCES teams (id),
    name TEXT NOT NULL,
    created_at BIGINT NOT NULL
);
CREATE TABLE sandboxes (
    id TEXT PRIMARY KEY,
    team TEXT NOT NULL REFERENCES teams (id),
    template TEXT NOT NULL,
    alias TEXT, -- the name it was created by, when that was not the template's ID
    metadata TEXT NOT NULL,
    internet BIGINT NOT NULL,
    state TEXT NOT NULL, -- creating, running, ended
    started_at BIGINT NOT NULL,
    end_at BIGINT NOT NULL, -- when it will end, or has ended
    reason TEXT, -- why it ended
    cpu_count BIGINT NOT NULL,
    memory_mb BIGINT NOT NULL,
    disk_mb BIGINT NOT NULL
);
CREATE INDEX sandboxes_by_team ON sandboxes (team, state, started_at);
CREATE TABLE idempotency (
    team TEXT NOT NULL,
    key TEXT NOT NULL,
    body_hash TEXT NOT NULL,
    sandbox TEXT, -- null while the create is under way
    created_at BIGINT NOT NULL,
    PRIMARY KEY (team, key)
);
