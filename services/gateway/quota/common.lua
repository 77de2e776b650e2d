-- Shared by all scripts. KEYS: the grant, then the account and the places of each subject.
-- ARGV: grant, lease in ms, tokens, then requests per minute, tokens per minute and places of each subject, -1 for none.
-- All times are the server's. Levels count in ticks, 60,000 to the unit, and are whole numbers below 2^53.
local TICKS = 60000
local clock = redis.call('TIME')
local now = clock[1] * 1000 + math.floor(clock[2] / 1000)
local grant, lease, tokens = ARGV[1], tonumber(ARGV[2]), tonumber(ARGV[3])

local function number(value, otherwise)
  if value then return tonumber(value) end
  return otherwise
end

-- A level after the time that has passed; full where nothing is known.
local function refilled(level, rate, at)
  if rate < 0 then return 0 end
  local most = rate * TICKS
  return math.min(most, number(level, most) + rate * math.max(0, now - at))
end

local function each(visit)
  for index = 1, (#KEYS - 1) / 2 do
    local account, places = KEYS[2 * index], KEYS[2 * index + 1]
    local at = 3 * index
    local limits = {tonumber(ARGV[at + 1]), tonumber(ARGV[at + 2]), tonumber(ARGV[at + 3])}
    local kept = redis.call('HMGET', account, 'at', 'requests', 'tokens')
    local since = number(kept[1], now)
    visit({
      index = index, account = account, places = places, at = math.max(now, since),
      request_rate = limits[1], token_rate = limits[2], most = limits[3],
      requests = refilled(kept[2], limits[1], since), tokens = refilled(kept[3], limits[2], since),
    })
  end
end

-- Writes a subject's levels. They are forgotten once they are full again.
local function keep(s)
  local left = 1000
  if s.request_rate > 0 then left = math.max(left, (s.request_rate * TICKS - s.requests) / s.request_rate) end
  if s.token_rate > 0 then left = math.max(left, (s.token_rate * TICKS - s.tokens) / s.token_rate) end
  redis.call('DEL', s.account)
  redis.call('HSET', s.account, 'at', s.at)
  if s.request_rate > 0 then redis.call('HSET', s.account, 'requests', s.requests) end
  if s.token_rate > 0 then redis.call('HSET', s.account, 'tokens', s.tokens) end
  redis.call('PEXPIRE', s.account, math.ceil(left) + 1000)
end

-- Takes tokens of a subject, or gives back where negative, at most up to a full bucket.
local function charge(s, amount)
  if s.token_rate > 0 then s.tokens = math.min(s.token_rate * TICKS, s.tokens - amount * TICKS) end
end

local function hold_place(s)
  if s.most < 0 then return end
  redis.call('ZADD', s.places, now + lease, grant)
  redis.call('PEXPIRE', s.places, lease)
end
