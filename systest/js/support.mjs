// One sandbox for the tests of a file, and small helpers.
import { after, before } from 'node:test'
import { randomUUID } from 'node:crypto'
import { setTimeout as sleep } from 'node:timers/promises'
import { Sandbox } from 'e2b'

for (const name of ['E2B_API_KEY', 'E2B_API_URL', 'E2B_SANDBOX_URL']) {
  if (!process.env[name]) {
    throw new Error(`${name} is not set: start a server and take its values from \`pando env\``)
  }
}

export const origin = new URL(process.env.E2B_SANDBOX_URL).origin
export { sleep }

/** A sandbox that the tests of a file share: `shared().sandbox`. */
export function shared() {
  const holder = {}
  before(async () => {
    holder.sandbox = await Sandbox.create({ timeoutMs: 600_000 })
  })
  after(async () => {
    await holder.sandbox?.kill()
  })
  return holder
}

/** A sandbox of the test's own, which ends with it. */
export async function own(t, options = {}) {
  const sandbox = await Sandbox.create({ timeoutMs: 300_000, ...options })
  t.after(() => sandbox.kill())
  return sandbox
}

/** A new directory in a sandbox. */
export async function place(sandbox) {
  const path = `/home/user/${randomUUID().slice(0, 13)}`
  await sandbox.files.makeDir(path)
  return path
}

/** What `check` says as soon as it is true. */
export async function eventually(check, limit = 10_000) {
  const deadline = Date.now() + limit
  for (;;) {
    const found = await check()
    if (found) return found
    if (Date.now() > deadline) throw new Error(`not within ${limit} ms`)
    await sleep(50)
  }
}
